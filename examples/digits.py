"""Handwritten digits on local Spark with two workers: `python examples/digits.py`."""

from __future__ import annotations

from functools import partial

import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparkdml as dml


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


def main() -> None:
    spark = dml.session_builder("digits", "local[2]").getOrCreate()
    data = load_digits()
    rows = pd.DataFrame(
        {"features": list((data.data / 16).astype("float32")), "label": data.target}
    )
    train, test = spark.createDataFrame(rows).randomSplit([0.8, 0.2], seed=7)

    estimator = dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        batchSize=32,
        epochs=15,
        numWorkers=2,
        seed=7,
        metrics={"accuracy": accuracy},
    )
    fitted = estimator.fit(train)
    print(fitted.history.to_pandas().to_string(index=False))
    print(f"test accuracy: {fitted.evaluate(test)['accuracy']:.1%}")
    fitted.transform(test).select("label", "prediction").show(5)
    spark.stop()


if __name__ == "__main__":
    main()
