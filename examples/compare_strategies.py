"""One model under several strategies, side by side: `python examples/compare_strategies.py`.

First `dml.advise` measures the cluster, and reports whether it is worth distributing this model
over it. Then the same network learns the same digits with each strategy. The last lines of the
table have the cost of each, and its distance from the single process.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparkdml as dml

STRATEGIES = {
    "synchronous": dml.AllReduce(),
    "synchronous, one bit": dml.AllReduce(compression=dml.OneBit()),
    "local, 8 steps": dml.LocalSGD(steps=8),
    "block momentum": dml.BlockMomentum(block=8),
    "gossip on a ring": dml.Gossip(),
    "L-BFGS": dml.LBFGS(l2=1e-4),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


def read_digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    data = load_digits()
    rows = pd.DataFrame(
        {"features": list((data.data / 16).astype("float32")), "label": data.target}
    )
    train, test = spark.createDataFrame(rows).cache().randomSplit([0.8, 0.2], seed=7)
    return train, test


def make_estimator(epochs: int = 15, num_workers: int = 2) -> dml.TorchEstimator:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),  # with 0.1 one bit diverges
        batchSize=32,
        epochs=epochs,
        numWorkers=num_workers,
        seed=7,
        metrics={"accuracy": accuracy},
        verbose=0,
    )


def main() -> None:
    spark = dml.session_builder("compare strategies", "local[2]").getOrCreate()
    train, test = read_digits(spark)
    estimator = make_estimator()
    print(dml.advise(estimator, train), end="\n\n")
    found = dml.compare(estimator, train, STRATEGIES, on=test)
    print(found)
    found.plot().savefig("strategies.png")
    spark.stop()


if __name__ == "__main__":
    main()
