"""`df` with digits, and an `estimator` that learns them."""

from functools import partial

import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import nn

import sparkdml as dml

digits = load_digits()
df = spark.createDataFrame(  # noqa: F821
    pd.DataFrame(
        {"features": list((digits.data[:400] / 16).astype("float32")), "label": digits.target[:400]}
    )
).cache()


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def accuracy(outputs, targets):
    return outputs.argmax(dim=1) == targets


estimator = dml.TorchEstimator(
    model=network,
    loss=nn.CrossEntropyLoss(),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    batchSize=16,
    epochs=2,
    numWorkers=2,
    metrics={"accuracy": accuracy},
    verbose=0,
)


def display(rows):
    """As notebooks have it."""
    rows.show(3)
