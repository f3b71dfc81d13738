"""Anomaly detection without labels, by an auto-encoder: `python examples/autoencoder.py`.

Eight sensors show two hidden causes. The network must compress a reading to two numbers and
reconstruct it. Rows that follow the rule are reconstructed; rows that break it are not, and the
error is the score. There are no targets, so the objective is a `step=` instead of a `loss=`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import Tensor, nn

import sparkdml as dml

SENSORS, BROKEN = 8, 0.02  # how many, and the fraction of readings in which one sensor is broken


def network() -> nn.Module:
    encoder = nn.Sequential(nn.Linear(SENSORS, 32), nn.Tanh(), nn.Linear(32, 2))
    decoder = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, SENSORS))
    return nn.Sequential(encoder, decoder)


def reconstruction_error(module: nn.Module, batch: Any) -> Tensor:
    """Return one value per row."""
    readings = batch["readings"]
    return (module(readings) - readings).square().mean(dim=1)


def step(module: nn.Module, batch: Any, ctx: Any) -> Tensor:
    """Return the loss of a batch, which is the score itself."""
    return reconstruction_error(module, batch)


def make_readings(spark: SparkSession, num_rows: int = 8_000) -> DataFrame:
    dice = np.random.default_rng(7)
    causes = dice.uniform(-1, 1, (num_rows, 2))
    readings = np.sin(causes @ dice.normal(size=(2, SENSORS))) + 0.02 * dice.normal(
        size=(num_rows, SENSORS)
    )
    broken = dice.random(num_rows) < BROKEN
    readings[broken, dice.integers(0, SENSORS, broken.sum())] += 1.5
    return spark.createDataFrame(
        pd.DataFrame({"readings": list(readings.astype(np.float32)), "broken": broken})
    )


def train(readings: DataFrame, epochs: int, num_workers: int = 2) -> dml.TorchModel:
    estimator = dml.TorchEstimator(
        model=network,
        step=step,
        optimizer=partial(torch.optim.Adam, lr=0.005),
        featuresCol="readings",
        predict=reconstruction_error,
        predictionCol="score",
        batchSize=64,
        epochs=epochs,
        numWorkers=num_workers,
        seed=7,
    )
    return estimator.fit(readings)


def find_anomalies(fitted: dml.TorchModel, readings: DataFrame) -> DataFrame:
    """Return the rows with the largest scores, as many as there are broken ones."""
    scored = fitted.transform(readings)
    [limit] = scored.approxQuantile("score", [1 - BROKEN], 0.001)
    return scored.where(scored.score > limit)


def main() -> None:
    spark = dml.session_builder("auto-encoder").getOrCreate()
    readings = make_readings(spark).cache()
    found = find_anomalies(train(readings, epochs=15), readings).cache()
    found.orderBy("score", ascending=False).show(5, truncate=50)
    right, broken = found.where("broken").count(), readings.where("broken").count()
    print(f"{found.count()} readings stand out; {right} of {broken} broken ones are among them")
    spark.stop()


if __name__ == "__main__":
    main()
