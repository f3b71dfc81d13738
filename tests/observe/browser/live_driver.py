"""A real run for a browser to watch: slow enough to be seen, with one failure on the way.

    live_driver.py FOLDER

Prints the address of Spark's UI, trains once a line comes in, prints "trained", and ends with the
next line, leaving the event log in FOLDER/log.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import sparkdml as dml
from sparkdml.testing.faults import FaultAt
from sparkdml.training.callbacks import Callback

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdml.training.training import Training


class Unhurried(Callback):
    """Time for the browser to look."""

    def on_step_end(self, training: Training) -> None:
        time.sleep(0.1)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) == targets).float()


def start_session(folder: Path) -> SparkSession:
    return (
        dml.session_builder("training-tab", "local[2,4]")
        .config("spark.ui.enabled", "true")
        .config("spark.ui.port", "0")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", (folder / "log").as_uri())
        .config("spark.eventLog.compress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )


def train(spark: SparkSession, folder: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1200, 8)).astype("float32")
    rows = [(x.tolist(), int(x.sum() > 0)) for x in inputs]
    dml.TorchEstimator(
        model=partial(nn.Linear, 8, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        metrics={"accuracy": accuracy},
        validation=0.2,
        batchSize=16,
        epochs=4,
        numWorkers=2,
        verbose=0,
        checkpoint=dml.Checkpoints(str(folder / "run"), every=20),
        callbacks=[Unhurried(), FaultAt(1, 70, "raise", str(folder))],
        strategy=dml.AllReduce(backend="torch"),
    ).fit(spark.createDataFrame(rows, "features array<float>, label bigint"))


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "log").mkdir()
    spark = start_session(folder)
    print(spark.sparkContext.uiWebUrl, flush=True)
    sys.stdin.readline()
    train(spark, folder)
    print("trained", flush=True)
    sys.stdin.readline()
    spark.stop()


if __name__ == "__main__":
    main()
