"""Strategies whose workers don't wait for each other, in Spark."""

from functools import partial

import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.testing.digits import digits


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("strategy", "lr"),
    [
        # One process comes to 0.39 in as many steps. If every other step were lost: to 0.67.
        pytest.param(dml.Hogwild(steps=10), 0.2, id="Hogwild"),
        # On threads it comes to 0.29, with Adagrad on its server.
        pytest.param(
            dml.Downpour(n_fetch=2, n_push=2, warm_start=5, num_servers=1), 0.1, id="Downpour"
        ),
    ],
)
def test_it_learns_from_every_row(spark, strategy, lr):
    rows = digits(400)
    frame = spark.createDataFrame(
        [(x.tolist(), int(y)) for x, y in zip(rows["x"], rows["y"], strict=True)],
        "features array<float>, label bigint",
    )
    fitted = dml.TorchEstimator(
        model=lambda: nn.Linear(64, 10),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=lr),
        strategy=strategy,
        batchSize=8,
        epochs=4,
        numWorkers=2,
        verbose=0,
    ).fit(frame)
    assert [row["rows"] for row in fitted.history] == [400.0] * 4
    assert fitted.history[-1]["loss"] < 0.55  # of 2.3 in the beginning
