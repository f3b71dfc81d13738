#!/usr/bin/env python3
"""Golden runs: trains with every strategy, and compares the weights bit for bit.

Use it for a change that must not alter any number, such as moving files. Run it on the commit
before the change and on the commit after it, on one machine (rounding depends on the processor):

    python scripts/golden.py write golden/     # before: trains, saves a model and checkpoints
    python scripts/golden.py compare golden/   # after: trains again, loads and resumes the old

The script uses public names only, so that one copy of it serves both commits.
tests/golden has a model and checkpoints that it wrote before the tree was redesigned.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdml as dml

NUM_ROWS, NUM_FEATURES, NUM_CLASSES = 300, 12, 3

# Name: the strategy and the number of workers. A strategy whose result depends on timing has one
# worker, with which it is deterministic.
CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "AllReduce": (dml.AllReduce, 2),
    "AllReduce-3": (dml.AllReduce, 3),
    "AllReduce-horovod": (partial(dml.AllReduce, backend="horovod", topology="native"), 2),
    "AllReduce-torch": (partial(dml.AllReduce, backend="torch", topology="native"), 2),
    "AllReduce-ring": (partial(dml.AllReduce, topology="ring"), 3),
    "AllReduce-tree": (partial(dml.AllReduce, topology="tree"), 3),
    "AllReduce-double-tree": (partial(dml.AllReduce, topology="double-tree"), 3),
    "AllReduce-halving-doubling": (partial(dml.AllReduce, topology="halving-doubling"), 3),
    "AllReduce-hierarchical": (partial(dml.AllReduce, topology="hierarchical"), 2),
    "AllReduce-buckets": (partial(dml.AllReduce, bucket_bytes=256), 2),
    "FP16": (lambda: dml.AllReduce(compression=dml.FP16()), 2),
    "BF16": (lambda: dml.AllReduce(compression=dml.BF16()), 2),
    "OneBit": (lambda: dml.AllReduce(compression=dml.OneBit()), 2),
    "TopK": (lambda: dml.AllReduce(compression=dml.TopK(0.1)), 2),
    "PowerSGD": (lambda: dml.AllReduce(compression=dml.PowerSGD(2)), 2),
    "LocalSGD": (partial(dml.LocalSGD, steps=4), 2),
    "BlockMomentum": (partial(dml.BlockMomentum, block=4, momentum=0.5), 2),
    "SlowMo": (partial(dml.SlowMo, steps=4), 2),
    "EASGD": (partial(dml.EASGD, steps=4), 2),
    "LayeredSGD": (partial(dml.LayeredSGD, 2), 2),
    "Gossip": (dml.Gossip, 3),
    "BackupWorkers": (partial(dml.BackupWorkers, backup=0), 2),
    "LBFGS": (dml.LBFGS, 2),
    "NewtonCG": (dml.NewtonCG, 2),
    "Averaging": (dml.Averaging, 2),
    "ParameterServer-BSP": (lambda: dml.ParameterServer(consistency=dml.BSP()), 2),
    "ParameterServer-SSP-1": (lambda: dml.ParameterServer(consistency=dml.SSP(2)), 1),
    "Downpour-1": (dml.Downpour, 1),
    "Hogwild-1": (partial(dml.Hogwild, steps=4), 1),
    "ADPSGD-1": (partial(dml.ADPSGD, every=4), 1),
    "AdaptiveBalance-1": (partial(dml.AdaptiveBalance, every=2), 1),
}
OWN_OPTIMIZER = ("LBFGS", "NewtonCG")  # which takes no optimizer=
MEASURED = (
    "seconds",
    "rows_per_second",
    "wait_seconds",
    "staleness",
)  # columns that depend on timing


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, NUM_CLASSES)
    )


def make_plain_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))


def make_rows(spark: SparkSession) -> DataFrame:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(NUM_ROWS, NUM_FEATURES, generator=generator).double()
    labels = (features[:, :NUM_CLASSES] + 0.3 * features[:, 3:6]).argmax(1)
    rows = [
        (Vectors.dense(row), int(label))
        for row, label in zip(features.tolist(), labels.tolist(), strict=True)
    ]
    return spark.createDataFrame(rows, ["features", "label"]).repartition(4).cache()


def make_estimator(name: str, **changes: Any) -> Any:
    make_strategy, num_workers = CASES[name]
    takes_optimizer = name not in OWN_OPTIMIZER
    optimizer = (
        {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5)} if takes_optimizer else {}
    )
    fields: dict[str, Any] = {
        "model": make_model() if takes_optimizer and num_workers > 1 else make_plain_model(),
        "loss": nn.CrossEntropyLoss(),
        "batchSize": 8,
        "epochs": 3,
        "numWorkers": num_workers,
        "seed": 7,
        "validation": 0.2,
        "verbose": 0,
        "strategy": make_strategy(),
        **optimizer,
    }
    return dml.TorchEstimator(**{**fields, **changes})


def digest(fitted: Any) -> dict[str, Any]:
    state = fitted.module.state_dict()
    content = b"".join(state[key].cpu().contiguous().numpy().tobytes() for key in sorted(state))
    rows = [
        {k: float(v).hex() for k, v in row.items() if k not in MEASURED and v is not None}
        for row in fitted.history
    ]
    return {"weights": hashlib.sha256(content).hexdigest(), "history": rows}


def train_all(df: DataFrame, only: list[str]) -> dict[str, Any]:
    found = {}
    for name in only or CASES:
        found[name] = digest(make_estimator(name).fit(df))
        print(f"{name}: {found[name]['weights']}", flush=True)
    return found


def write_formats(folder: Path, df: DataFrame) -> None:
    """A saved model of four epochs, and the checkpoints of a run that ended after two."""
    fitted = make_estimator("AllReduce", epochs=4).fit(df)
    fitted.write().overwrite().save(str(folder / "model"))
    place = folder / "checkpoints"
    make_estimator("AllReduce", epochs=2, checkpoint=dml.Checkpoints(str(place))).fit(df)
    (folder / "uninterrupted.json").write_text(json.dumps(digest(fitted), indent=1))


def compare_formats(folder: Path, df: DataFrame) -> list[str]:
    wanted = json.loads((folder / "uninterrupted.json").read_text())
    wrong = []
    loaded = dml.TorchModel.load(str(folder / "model"))
    if digest(loaded) != wanted:
        wrong.append("the saved model's weights or history")
    if loaded.transform(df).count() != NUM_ROWS:
        wrong.append("the saved model's transform")
    copy = folder / "resumed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "checkpoints", copy)
    run = make_estimator("AllReduce", epochs=4, checkpoint=dml.Checkpoints(str(copy)))
    if digest(run.fit(df)) != wanted:
        wrong.append("the run that was resumed from the old checkpoint")
    lineage = str(dml.Checkpoints(str(copy)).lineage())
    print(lineage)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    spark = SparkSession.builder.master("local[6]").appName("golden").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    df = make_rows(spark)
    path = arguments.folder / "runs.json"
    if arguments.what == "write":
        found = train_all(df, arguments.only)
        path.write_text(json.dumps(found, indent=1))
        write_formats(arguments.folder.resolve(), df)
        return 0
    wanted = json.loads(path.read_text())
    found = train_all(df, arguments.only)
    wrong = [name for name in found if found[name] != wanted.get(name)]
    wrong += [] if arguments.only else compare_formats(arguments.folder.resolve(), df)
    print(f"{len(found)} cases compared; different: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
