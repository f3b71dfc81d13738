"""Your own callback: `python examples/extending/callback.py`.

Measures the gradient noise scale while a model trains: the number of rows above which a larger
batch (more workers) hardly improves a step, and only makes it more expensive. The gradients of two
steps in a row are two samples of nearly the same gradient; their mean has half the noise of each,
so the difference of the squared norms tells noise from signal. (McCandlish, Kaplan, Amodei et al.
2018, "An empirical model of large-batch training", arXiv 1812.06162, appendix A.1.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparkdml as dml
from sparkdml.extending import TrainingRun


class NoiseScale(dml.Callback):
    """Adds the column `noise_scale` to the history, in rows.

    Args:
        keep: how much of the running means is kept from step to step, from 0 to below 1.
    """

    def __init__(self, keep: float = 0.99) -> None:
        if not 0 <= keep < 1:
            raise dml.ParameterError("keep", keep, "a number from 0 to below 1")
        self.keep = keep
        self._noise = self._signal = 0.0  # running means
        self._previous: Tensor | None = None  # the last step's gradient

    def on_gradient(self, training: TrainingRun) -> None:
        """The gradient is the mean over all ranks' rows: the same on every rank."""
        grads, rows = training.task.params.grads, training.task.totals().rows
        if self._previous is not None:
            of_one = (squared_norm(grads) + squared_norm(self._previous)) / 2
            of_both = squared_norm((grads + self._previous) / 2)
            noise = (of_one - of_both) / (1 / rows - 1 / (2 * rows))
            self._noise = self.keep * self._noise + (1 - self.keep) * noise
            signal = 2 * of_both - of_one
            self._signal = self.keep * self._signal + (1 - self.keep) * signal
        self._previous = grads.clone()

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        row["noise_scale"] = self._noise / self._signal if self._signal > 0 else math.nan

    def state(self) -> dict[str, Any]:
        """Everything that the next call depends on, or a resumed run would have other numbers."""
        return {"noise": self._noise, "signal": self._signal, "previous": self._previous}

    def load(self, state: Mapping[str, Any]) -> None:
        self._noise, self._signal = state["noise"], state["signal"]
        self._previous = state["previous"]


def squared_norm(grads: Tensor) -> float:
    return float(grads.square().sum())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def read_digits(spark: SparkSession) -> DataFrame:
    data = load_digits()
    return spark.createDataFrame(
        pd.DataFrame({"features": list((data.data / 16).astype("float32")), "label": data.target})
    )


def train(rows: DataFrame, epochs: int) -> dml.TorchModel:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05),
        callbacks=[NoiseScale()],
        batchSize=32,
        epochs=epochs,
        numWorkers=2,
        seed=7,
    ).fit(rows)


def main() -> None:
    spark = dml.session_builder("your own callback").getOrCreate()
    for row in train(read_digits(spark), epochs=6).history:
        print(f"epoch {row['epoch']:2.0f}: noise scale {row['noise_scale']:6.0f} rows")
    spark.stop()


if __name__ == "__main__":
    main()
