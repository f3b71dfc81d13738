"""Your own checkpoint store: `python examples/extending/checkpoint_store.py`.

All checkpoints of a run are in one SQLite database: a single file that is copied, mailed and backed
up as one, on a disk that all hosts share. The run fails in the middle, resumes from its newest
checkpoint, and is continued by a second call for more epochs. `--database` names the file.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdml as dml
from sparkdml.extending import check_name
from sparkdml.testing.faults import FaultAt

STEPS_AN_EPOCH = 29  # 1,797 rows, 2 workers with 32 rows each a step


@dataclass(frozen=True)
class SqliteStore:
    """A `dml.CheckpointStore`: a row for each object. Up to 1 GB an object, SQLite's limit.

    Every call opens a connection of its own: a connection can't be pickled, and must not be used by
    several threads.
    """

    path: str

    @property
    def url(self) -> str:
        return f"sqlite:{self.path}"

    def write(self, name: str, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        check_name(name)
        content = b"".join(chunks)  # before the transaction, which keeps other writers waiting
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (name, content))

    def read(self, name: str) -> bytes:
        check_name(name)
        with self._transaction() as database:
            found = database.execute("SELECT content FROM objects WHERE name = ?", (name,))
            row = found.fetchone()
        if row is None:
            raise FileNotFoundError(f"{self.url} has no object {name}")
        content: bytes = row[0]
        return content

    def names(self, prefix: str = "") -> list[str]:
        if prefix:
            check_name(prefix.rstrip("/"))
        with self._transaction() as database:
            found = database.execute("SELECT name FROM objects ORDER BY name")
            return [name for (name,) in found if name.startswith(prefix)]

    def remove(self, name: str) -> None:
        check_name(name)
        with self._transaction() as database:
            database.execute("DELETE FROM objects WHERE name = ?", (name,))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Committed at its end, or rolled back; durable once it is committed."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60.0)) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, content BLOB)"
                )
                yield database
        except sqlite3.OperationalError as error:  # locked, a full disk: sparkdml tries again
            raise OSError(f"{self.url}: {error}") from error


def read_digits(spark: SparkSession) -> DataFrame:
    data = load_digits()
    return spark.createDataFrame(
        pd.DataFrame({"features": list((data.data / 16).astype("float32")), "label": data.target})
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


def train(rows: DataFrame, epochs: int, **params: Any) -> dml.TorchModel:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        batchSize=32,
        epochs=epochs,
        numWorkers=2,
        seed=7,
        **params,
    ).fit(rows)


def train_with_a_failure(rows: DataFrame, store: SqliteStore, folder: str) -> dml.TorchModel:
    """Rank 1 fails once in the second epoch; a second call trains two epochs more."""
    checkpoint = dml.Checkpoints(store=store, every="10 steps")
    fault = FaultAt(rank=1, step=STEPS_AN_EPOCH + 16, kind="raise", folder=folder)
    train(rows, epochs=2, checkpoint=checkpoint, callbacks=[fault])
    return train(rows, epochs=4, checkpoint=checkpoint, callbacks=[fault])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", type=Path, help="a new file; else a temporary one")
    folder = tempfile.mkdtemp(prefix="sparkdml-store-")
    path = parser.parse_args().database or Path(folder, "run.sqlite")
    if path.exists():
        parser.error(f"--database must be a new file, but {path} is there")
    store = SqliteStore(str(path.absolute()))
    spark = dml.session_builder("checkpoints in a database", "local[2]").getOrCreate()
    rows = read_digits(spark).cache()
    fitted = train_with_a_failure(rows, store, folder)
    print(dml.Checkpoints(store=store).lineage())
    undisturbed = train(rows, epochs=4)
    spark.stop()
    one, other = fitted.module.state_dict(), undisturbed.module.state_dict()
    if not all(torch.equal(one[name], other[name]) for name in other):
        raise SystemExit("failed and resumed, and the weights differ: they should not")
    print(f"failed and resumed from {store.url}: the weights are the same, bit for bit")


if __name__ == "__main__":
    main()
