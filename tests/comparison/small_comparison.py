"""A small model, a few rows: what the tests of comparing and advising train."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import sparkdml as dml
from sparkdml.testing.models import accuracy


def make_rows(spark):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(160, 4, generator=generator)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    rows = [(r.tolist(), int(y)) for r, y in zip(x, labels, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label long").cache()


def make_estimator(**changes):
    fields = {
        "model": partial(nn.Linear, 4, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.5),
        "metrics": {"accuracy": accuracy},
        "numWorkers": 2,
        "batchSize": 8,
        "epochs": 2,
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**fields, **changes})
