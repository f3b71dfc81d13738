"""`dml.advise`: measure a step and an allreduce on the cluster, and say what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

import torch

from sparkdml.comparison.advice import Advice
from sparkdml.comparison.costs import Measured, Network
from sparkdml.errors import ParameterError
from sparkdml.runtime.driver import launch
from sparkdml.training.task import Task, TaskPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.estimator import TorchEstimator
    from sparkdml.runtime.context import Context
    from sparkdml.training.fit import Fit

WARM_UP = 3  # the first steps and messages pay for what the later ones find ready


@dataclass(frozen=True)
class Found:
    """What one rank measured, in seconds."""

    rows: int
    read: float
    step: float | None  # None without rows
    small: float
    large: float
    model_bytes: int


@dataclass(frozen=True)
class Probe:
    """In every worker: read the rows, make some steps, reduce some tensors. Nothing is kept."""

    task: TaskPlan
    batch_size: int
    steps: int

    def __call__(self, ctx: Context) -> Found:
        began = time.perf_counter()
        rows = ctx.data.num_rows
        read = time.perf_counter() - began
        task = Task(self.task, ctx.device)
        ctx.comm.barrier()  # so that all step at the same time
        step = self._steps(ctx, task) if rows else None
        ctx.comm.barrier()
        gradients = task.params.grads
        return Found(
            rows=rows,
            read=read,
            step=step,
            small=self._time(lambda: ctx.comm.allreduce_(gradients[:1].clone())),
            large=self._time(lambda: ctx.comm.allreduce_(gradients)),
            model_bytes=gradients.nbytes,
        )

    def _steps(self, ctx: Context, task: Task) -> float:
        """The median of a step, its batch included."""
        taken: list[float] = []
        epoch = 1  # epochs from the spool, which is what all but the first one read
        while len(taken) < self.steps + WARM_UP:
            began = time.perf_counter()
            for batch in islice(ctx.feed(self.batch_size, epoch), self.steps + WARM_UP):
                task.grad(batch)
                task.apply(task.totals())
                if ctx.device.type == "cuda":
                    torch.cuda.synchronize(ctx.device)
                taken.append(time.perf_counter() - began)
                began = time.perf_counter()
            epoch += 1
        return median(taken[WARM_UP:])

    def _time(self, call: Callable[[], object]) -> float:
        taken = []
        for _ in range(self.steps + WARM_UP):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
        return median(taken[WARM_UP:])


def advise(
    estimator: TorchEstimator, df: DataFrame, *, max_workers: int | None = None, steps: int = 20
) -> Advice:
    """Is distribution needed for this model and these rows, with how many workers, by what?

    Two short jobs measure: `max_workers` at once, then one worker alone. Each reads the rows once,
    as a training's first epoch would, makes `steps` steps and as many allreduces. Nothing is kept.

    Args:
        estimator: as it would be fitted; its strategy only names the backend.
        df: the rows.
        max_workers: the most to consider; the estimator's numWorkers if left out, or all slots.
        steps: how many to measure; the median counts.
    """
    if steps < 1:
        raise ParameterError("steps", steps, "at least 1")
    if max_workers is not None and max_workers < 1:
        raise ParameterError("max_workers", max_workers, "at least 1")
    fit = estimator._prepare(df)
    if max_workers is None:
        max_workers = fit.options.num_workers
    together = _measure(fit, max_workers, steps)
    alone = together if len(together) == 1 else _measure(fit, 1, steps)
    return Advice(combine(alone, together, fit.job.schedule.batch_size), fit.job.schedule.epochs)


def _measure(fit: Fit, num_workers: int | None, steps: int) -> list[Found]:
    probe = Probe(fit.job.task, fit.job.schedule.batch_size, steps)
    options = replace(fit.options, num_workers=num_workers, max_restarts=0, name="sparkdml: advise")
    found: list[Found] = launch(fit.spark, probe, options, fit.dataset, fit.feed)
    return found


def combine(alone: list[Found], together: list[Found], batch_size: int) -> Measured:
    """One worker's measurements and everybody's, as what the arithmetic needs."""
    rows = sum(found.rows for found in together)
    stepped = [found.step for found in together if found.step is not None]
    single = next(found.step for found in alone if found.step is not None)
    slowest = max(together, key=lambda found: found.large)
    return Measured(
        rows=rows,
        batch_size=batch_size,
        model_bytes=slowest.model_bytes,
        max_workers=len(together),
        step_alone=single,
        step_together=median(stepped),
        slowest_together=max(stepped),
        read_rate=rows / max(max(found.read for found in together), 1e-9),
        network=Network.fit(len(together), slowest.small, slowest.large, slowest.model_bytes),
    )
