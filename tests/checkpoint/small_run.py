"""A small run with everything in it on which the bits of a state can depend."""

from functools import partial

import numpy as np
import torch
from torch import nn

import sparkdml as dml
from sparkdml.testing.models import noisy_classifier

OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def make_rows(spark, num_rows=600):
    """Eight numbers and whether they add up to more than nothing, in three partitions."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(num_rows, 8)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype(int)
    data = [(x.tolist(), int(y)) for x, y in zip(inputs, labels, strict=True)]
    return spark.createDataFrame(data, "features array<float>, label bigint").repartition(3)


def make_estimator(num_workers=2, optimizer="momentum", backend="torch", **params):
    """37 or 38 steps an epoch on one worker, 19 on two, 13 on three."""
    defaults = {
        "model": noisy_classifier,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": OPTIMIZERS[optimizer],
        "batchSize": 16,
        "epochs": 3,
        "seed": 3,
        "heartbeatTimeout": 2.0,
        "replacementSeconds": 5.0,
        "verbose": 0,
    }
    return dml.TorchEstimator(
        **{**defaults, **params}, numWorkers=num_workers, strategy=dml.AllReduce(backend=backend)
    )


def equal(one, other):
    """Whether two models are the same, bit for bit."""
    first, second = one.module.state_dict(), other.module.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
