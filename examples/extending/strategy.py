"""Your own strategy: `python examples/extending/strategy.py`.

Post-local SGD. In the first epochs all workers take each step together, by allreduce; after them
each takes steps of its own, and the models are averaged now and then. That saves communication once
the models differ little, and generalizes as small batches do. (Lin, Stich, Patel and Jaggi 2020,
"Don't use large mini-batches, use local SGD", arXiv 1808.07217.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparkdml as dml
from sparkdml.extending import VOTES, Batch, Entry, Epoch, Role, State, Training, TrainingPlan


class PostLocalSGD(dml.Strategy):
    """Allreduce in the first epochs, then local steps.

    Args:
        epochs: how many epochs begin with allreduce.
        steps: batches of each worker between two averages, afterwards.
    """

    def __init__(self, epochs: int = 2, steps: int = 8) -> None:
        for name, value, least in (("epochs", epochs, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or value < least:
                raise dml.ParameterError(name, value, f"a whole number of at least {least}")
        self.epochs, self.steps = epochs, steps

    # -- at the driver --------------------------------------------------------------------------

    def roles(self, num_workers: int) -> list[Role]:
        """One barrier job, of tasks that all train."""
        return [Role("worker", num_workers)]

    def check(self, plan: TrainingPlan) -> None:
        """Before any job: what this strategy can't do."""
        if plan.task.precision == "fp16":
            raise dml.ParameterError(
                "precision",
                "fp16",
                f"'float32' or 'bf16' with {self!r}, whose workers would have a loss scale each",
            )

    # -- in each worker -------------------------------------------------------------------------

    def run(self, role: str, training: Training) -> None:
        self._task, self._is_local = training.task, False
        with self.open_wire(training.ctx) as self._comm:
            self._comm.broadcast_(self._task.params.values)  # all begin with the model of rank 0
            for buffer in self._task.module.buffers():
                self._comm.broadcast_(buffer)
            for epoch in training.epochs(self):
                self._is_local = epoch.number >= self.epochs
                if self._is_local:
                    self._train_apart(epoch)
                else:
                    self._train_together(epoch)

    def _train_together(self, epoch: Epoch) -> None:
        """A batch of every rank is one step. A rank that has run out has empty batches."""
        task = self._task
        buckets = task.params.buckets(max_bytes=8 << 20)
        for batch in epoch:
            task.grad(batch)  # sums over rows, of gradients and stats
            for bucket in buckets:
                self._comm.allreduce_(bucket.tensor)
            totals = task.totals()
            if not epoch.count(totals):
                break  # no rank had a row left
            task.apply(totals)  # divides by all rows, and takes the optimizer's step
            epoch.tick()  # callbacks, and a checkpoint if one is due

    def _train_apart(self, epoch: Epoch) -> None:
        """A round of local steps and an average is one step to all else."""
        task = self._task
        for batches in epoch.rounds(self.steps):
            stats = self._take_local_steps(batches)
            own_rows = task.totals(stats).rows
            totals = task.totals(self._comm.allreduce_(stats))
            if not epoch.count(totals):
                break
            values = task.params.values
            self._comm.allreduce_(values.mul_(own_rows / totals.rows))
            epoch.tick()

    def _take_local_steps(self, batches: Iterator[Batch]) -> Tensor:
        """The sums of the steps' stats: weight, rows, loss, metrics, votes."""
        task = self._task
        stats = torch.zeros_like(task.params.stats, dtype=torch.float64)
        for batch in batches:
            task.grad(batch)
            stats += task.params.stats
            totals = task.totals()
            if not math.isfinite(totals.loss):
                break  # `epoch.count` raises, on all ranks alike
            task.apply(totals)
        stats[VOTES] = stats.new_tensor(task.vote)  # one for the round, not one for each batch
        return stats

    # -- checkpoints ----------------------------------------------------------------------------

    def state(self) -> State:
        """Parameters are alike when a checkpoint is taken; after local steps momenta differ."""
        if not self._is_local:
            return {}
        own = {name: entry.value for name, entry in self._task.optimizers.state().items()}
        return {"optimizers": Entry(own, "mean")}

    def load(self, state: Mapping[str, Any]) -> None:
        if "optimizers" in state:
            self._task.optimizers.load(state["optimizers"])

    def __repr__(self) -> str:
        """A part of the run's fingerprint: with another setting, a run does not resume."""
        return f"PostLocalSGD(epochs={self.epochs}, steps={self.steps})"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


def read_digits(spark: SparkSession) -> DataFrame:
    data = load_digits()
    return spark.createDataFrame(
        pd.DataFrame({"features": list((data.data / 16).astype("float32")), "label": data.target})
    )


def make_estimator(strategy: dml.Strategy, epochs: int) -> dml.TorchEstimator:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        strategy=strategy,
        metrics={"accuracy": accuracy},
        batchSize=16,
        epochs=epochs,
        numWorkers=2,
        seed=7,
    )


def main() -> None:
    spark = dml.session_builder("your own strategy").getOrCreate()
    train, test = read_digits(spark).randomSplit([0.8, 0.2], seed=7)
    for strategy in (dml.AllReduce(), PostLocalSGD(epochs=2, steps=8)):
        fitted = make_estimator(strategy, epochs=8).fit(train)
        steps = sum(fitted.history.steps)
        found = fitted.evaluate(test)["accuracy"]
        print(f"{strategy}: {steps:.0f} sums of gradients or models, {found:.1%} right")
    spark.stop()


if __name__ == "__main__":
    main()
