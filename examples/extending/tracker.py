"""Your own tracker: `python examples/extending/tracker.py`.

Writes the numbers of every fit into one SQLite file, where SQL compares the runs.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdml as dml
from sparkdml.extending import Tracker, TrackerSettings

TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, name TEXT, facts TEXT, outcome TEXT, cause TEXT
);
CREATE TABLE IF NOT EXISTS numbers (run TEXT, step INTEGER, name TEXT, value REAL);
"""
BEST = """
SELECT json_extract(facts, '$."plan.optimizer"') AS optimizer, MIN(value) AS best
FROM numbers JOIN runs USING (run) WHERE numbers.name = 'loss' GROUP BY run ORDER BY best
"""


@dataclass(frozen=True)
class SQLite(TrackerSettings):
    """Each fit is a row of `runs`; its numbers are rows of `numbers`."""

    path: str

    def begin(self, run: str, name: str, facts: Mapping[str, str]) -> SQLiteRun:
        return SQLiteRun(self.path, run, name, facts)


class SQLiteRun(Tracker):
    """One run. SQLite wants one thread, and all calls of a run come from one, `begin` included."""

    def __init__(self, path: str, run: str, name: str, facts: Mapping[str, str]) -> None:
        self._run = run
        self._database = sqlite3.connect(path, timeout=10)  # another fit may be writing
        self._database.executescript(TABLES)
        with self._database as transaction:
            transaction.execute(
                "INSERT INTO runs (run, name, facts) VALUES (?, ?, ?)",
                (run, name, json.dumps(dict(facts))),
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._database as transaction:
            transaction.executemany(
                "INSERT INTO numbers VALUES (?, ?, ?, ?)",
                [(self._run, step, name, value) for name, value in metrics.items()],
            )

    def end(self, outcome: str, cause: str | None) -> None:
        with self._database as transaction:
            transaction.execute(
                "UPDATE runs SET outcome = ?, cause = ? WHERE run = ?", (outcome, cause, self._run)
            )

    def close(self) -> None:
        self._database.close()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def read_digits(spark: SparkSession) -> DataFrame:
    data = load_digits()
    return spark.createDataFrame(
        pd.DataFrame({"features": list((data.data / 16).astype("float32")), "label": data.target})
    )


def train(rows: DataFrame, path: str, learning_rates: list[float], epochs: int) -> None:
    for learning_rate in learning_rates:
        dml.TorchEstimator(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=learning_rate),
            epochs=epochs,
            numWorkers=2,
            tracker=SQLite(path),
            seed=7,
        ).fit(rows)


def best_losses(path: str) -> list[tuple[str, float]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(BEST).fetchall()


def main() -> None:
    spark = dml.session_builder("your own tracker").getOrCreate()
    train(read_digits(spark), "runs.sqlite", [0.01, 0.1, 0.5], epochs=5)
    for optimizer, loss in best_losses("runs.sqlite"):
        print(f"{optimizer}: loss {loss:.3f}")
    spark.stop()


if __name__ == "__main__":
    main()
