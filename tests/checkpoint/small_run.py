"""A small run with everything in it on which the bits of a state can depend."""

from functools import partial

import torch
from torch import nn

import sparkdml as dml
from sparkdml.testing.models import noisy_classifier

OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


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
