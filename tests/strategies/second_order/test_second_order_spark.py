"""Second-order methods through the estimator, on Spark."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from pyspark import TaskContext
from torch import nn

import sparkdml as dml

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@dml.factory
def make_model() -> nn.Module:
    return nn.Linear(4, 1).double()


def test_ridge_regression_equals_the_normal_equations(spark: SparkSession) -> None:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(200, 4)) * [1.0, 10.0, 0.1, 3.0]
    y = x @ [1.0, -2.0, 3.0, 0.5] + generator.normal(size=200)
    rows = [(features.tolist(), float(label)) for features, label in zip(x, y, strict=True)]
    df = spark.createDataFrame(rows, "features array<double>, label double").cache()
    with_one = np.column_stack([x, np.ones(200)])
    l2 = 0.05
    expected = np.linalg.solve(
        2 * with_one.T @ with_one / 200 + l2 * np.eye(5), 2 * with_one.T @ y / 200
    )
    estimator = dml.TorchEstimator(
        model=make_model,
        loss=nn.MSELoss(),
        strategy=dml.LBFGS(l2=l2, tolerance=1e-8),
        numWorkers=2,
        batchSize=32,
        epochs=60,
        verbose=0,
    )
    fitted = estimator.fit(df)
    found = fitted.module.state_dict()
    weights = np.append(found["weight"].numpy(), found["bias"].numpy())
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    assert "tolerance" in (fitted.history.stopped or "")


class DropsAndLags(nn.Module):
    """Random, and slow in one of the tasks."""

    def __init__(self, slow_task: int | None) -> None:
        super().__init__()
        self.linear, self.dropout = make_model(), nn.Dropout(0.3)
        self._slow_task = slow_task

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        task = TaskContext.get()
        if task is not None and task.partitionId() == self._slow_task:
            time.sleep(0.02)
        return self.linear(self.dropout(x))


def test_with_backups_it_is_the_same_function_on_any_rank(
    spark: SparkSession,
) -> None:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(300, 4))
    rows = [(features.tolist(), float(features.sum())) for features in x]
    df = spark.createDataFrame(rows, "features array<double>, label double").cache()
    losses = []
    for slow_task in (None, 1):
        estimator = dml.TorchEstimator(
            model=partial(DropsAndLags, slow_task),
            loss=nn.MSELoss(),
            strategy=dml.LBFGS(tolerance=0.0, backups=True),
            augment=jitter,
            numWorkers=2,
            batchSize=16,
            epochs=4,
            verbose=0,
        )
        losses.append([row["loss"] for row in estimator.fit(df).history])
    assert losses[0][-1] < 0.9 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-9)


def jitter(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    features = columns["features"]
    return {"features": features + 0.1 * torch.randn_like(features)}


def test_an_optimizer_has_no_place_beside_it(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.createDataFrame([([1.0] * 4, 1.0)], "features array<double>, label double")
    estimator = dml.TorchEstimator(
        model=make_model,
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        strategy=dml.LBFGS(),
        verbose=0,
    )
    with pytest.raises(dml.ParameterError, match="left out with LBFGS"):
        estimator.fit(df)
    without = dml.TorchEstimator(model=make_model, loss=nn.MSELoss())
    with pytest.raises(dml.ParameterError, match="optimizer must be given"):
        without.fit(df)
    without.setStrategy(dml.LBFGS(history=4)).setEpochs(1).save(str(tmp_path / "saved"))
    with dml.allow_packages("tests"):
        loaded = dml.TorchEstimator.load(str(tmp_path / "saved"))
    assert repr(loaded.getStrategy()) == repr(dml.LBFGS(history=4))
