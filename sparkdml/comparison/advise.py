"""`dml.advise`: measure a step and an allreduce on the cluster, and say what follows from them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkdml.comparison.advice import Advice
from sparkdml.comparison.costs import Measured, Network
from sparkdml.errors import DataError, ParameterError
from sparkdml.runtime.context import NO_ROWS
from sparkdml.runtime.driver import launch
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.strategies.wires import open_wire
from sparkdml.training.task import Task, TaskPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.comm.base import Communicator
    from sparkdml.estimator import TorchEstimator
    from sparkdml.runtime.context import Context
    from sparkdml.training.fit import Fit

WARM_UP = 3  # the first steps and messages pay for what the later ones find ready


@dataclass(frozen=True)
class Found:
    """What one rank measured, in seconds."""

    rows: int
    read: float
    step: float | None  # None without a batch
    small: float  # an allreduce of one number, by what `AllReduce` would use
    large: float  # of all gradients
    model_bytes: int
    topology: str = "native"  # what was used


@dataclass(frozen=True)
class Probe:
    """In every worker: read the rows, make some steps, reduce some tensors. Nothing is kept."""

    task: TaskPlan
    batch_size: int  # the rows of a step
    steps: int
    topology: str  # as `AllReduce` is given it

    def __call__(self, ctx: Context) -> Found:
        began = time.perf_counter()
        rows = ctx.data.num_rows
        read = time.perf_counter() - began
        task = Task(self.task, ctx.device)
        ctx.comm.barrier()  # so that all step at the same time
        step = self._steps(ctx, task) if rows else None
        ctx.comm.barrier()
        gradients = task.params.grads
        with open_wire(ctx.comm, ctx, self.topology) as wire:
            return Found(
                rows=rows,
                read=read,
                step=step,
                small=self._time(wire, gradients[:1].clone()),
                large=self._time(wire, gradients),
                model_bytes=gradients.nbytes,
                topology=wire.topology,
            )

    def _steps(self, ctx: Context, task: Task) -> float | None:
        """The median of a step, its batch included; None if there is no batch."""
        taken: list[float] = []
        epoch = 1  # epochs from the spool, which is what all but the first one read
        while len(taken) < self.steps + WARM_UP:
            taken_before = len(taken)
            began = time.perf_counter()
            for batch in islice(ctx.feed(self.batch_size, epoch), self.steps + WARM_UP):
                task.grad(batch)
                task.apply(task.totals())
                settle(ctx.device)
                taken.append(time.perf_counter() - began)
                began = time.perf_counter()
            if len(taken) == taken_before:
                break  # its rows are fewer than a batch has to have, or none of them was drawn
            epoch += 1
        return median(taken[WARM_UP:] or taken) if taken else None

    def _time(self, comm: Communicator, tensor: Tensor) -> float:
        taken = []
        begin = comm.repeated(tensor)
        for _ in range(self.steps + WARM_UP):
            began = time.perf_counter()
            begin().wait()
            settle(tensor.device)
            taken.append(time.perf_counter() - began)
        return median(taken[WARM_UP:])


def settle(device: torch.device) -> None:
    """Wait for what a GPU has only been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def advise(
    estimator: TorchEstimator, df: DataFrame, *, max_workers: int | None = None, steps: int = 20
) -> Advice:
    """Is distribution needed for this model and these rows, with how many workers, by what?

    Two short jobs measure: `max_workers` at once, then one worker alone. Each reads the rows once,
    as a training's first epoch would, makes `steps` steps and as many allreduces. Nothing is kept.

    Args:
        estimator: as it would be fitted; of its strategy only the backend counts, and the topology
            if it is an `AllReduce`.
        df: the rows.
        max_workers: the most to consider; the estimator's numWorkers if left out, or all slots.
        steps: how many to measure; the median counts.

    Raises:
        DataError: no worker gets a batch, so that there is no step to measure.
    """
    if steps < 1:
        raise ParameterError("steps", steps, "at least 1")
    if max_workers is not None and max_workers < 1:
        raise ParameterError("max_workers", max_workers, "at least 1")
    fit = estimator._prepare(df)
    if max_workers is None:
        max_workers = fit.options.num_workers
    schedule, strategy = fit.job.schedule, fit.job.strategy
    probe = Probe(
        fit.job.task,
        schedule.batch_size * schedule.accumulate,
        steps,
        strategy.topology if isinstance(strategy, AllReduce) else "auto",
    )
    together = _measure(fit, probe, max_workers)
    alone = together if len(together) == 1 else _measure(fit, probe, 1)
    return Advice(combine(alone, together, probe.batch_size), schedule.epochs)


def _measure(fit: Fit, probe: Probe, num_workers: int | None) -> list[Found]:
    options = replace(fit.options, num_workers=num_workers, max_restarts=0, name="sparkdml: advise")
    found: list[Found] = launch(fit.spark, probe, options, fit.dataset, fit.feed)
    if not any(one.rows for one in found):
        raise DataError(NO_ROWS)
    if all(one.step is None for one in found):
        raise DataError(
            f"none of {len(found)} workers has a batch, so there is no step to measure: one takes "
            f"{probe.batch_size:,} rows (batchSize, times gradientAccumulation), and dropLast=True "
            "leaves out what is shorter, samplingCol= what is not drawn. Lower batchSize or "
            "max_workers"
        )
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
        topology=slowest.topology,
    )
