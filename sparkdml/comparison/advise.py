"""`dml.advise`: measure a step and an allreduce on the cluster, and say what follows from them."""

from __future__ import annotations

import math
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
from sparkdml.runtime.driver.launch import launch
from sparkdml.runtime.driver.request import LaunchRequest
from sparkdml.runtime.worker.context import NO_ROWS
from sparkdml.runtime.worker.tracing import open_wire
from sparkdml.training.plan import StepContext
from sparkdml.training.task import Task, TaskPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.comm.base import Communicator
    from sparkdml.estimator import TorchEstimator
    from sparkdml.runtime.worker.context import Context

WARM_UP = 3  # the first steps and messages pay for what the later ones find ready


@dataclass(frozen=True)
class Found:
    """What one rank measured, in seconds."""

    rows: int
    seconds: float  # from when its rows were there until it was done
    step: float | None  # while all step; None without a batch
    alone: float | None  # while the others rest; of the quickest only
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
        rows = ctx.data.num_rows
        began = time.perf_counter()
        task = Task(self.task, ctx.device)
        task.forward.context = StepContext(ctx.device, ctx)
        task.forward.context.training = True
        ctx.comm.barrier()  # so that all step at the same time
        step = self._steps(ctx, task) if rows else None
        alone = None
        if quickest(ctx, step) == ctx.rank:
            alone = step if ctx.size == 1 else self._steps(ctx, task)
        ctx.comm.barrier()
        gradients = task.params.grads
        with open_wire(ctx.comm, ctx, self.topology) as wire:
            small = self._time(wire, gradients[:1].clone())
            large = self._time(wire, gradients)
        return Found(
            rows=rows,
            seconds=time.perf_counter() - began,
            step=step,
            alone=alone,
            small=small,
            large=large,
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


def quickest(ctx: Context, step: float | None) -> int | None:
    """The rank with the shortest step; None if no rank has one."""
    own = torch.tensor([math.inf if step is None else step], dtype=torch.float64)
    steps = torch.cat(ctx.comm.allgather(own.to(ctx.device))).tolist()
    return None if min(steps) == math.inf else steps.index(min(steps))


def settle(device: torch.device) -> None:
    """Wait for what a GPU has only been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def advise(
    estimator: TorchEstimator, df: DataFrame, *, max_workers: int | None = None, steps: int = 20
) -> Advice:
    """Is distribution needed for this model and these rows, with how many workers, by what?

    A short job measures. Its workers read all rows once, as a training's first epoch would, and
    make `steps` steps at the same time; then the quickest of them makes as many while the others
    rest, and all of them make as many allreduces. Nothing is kept. "One worker" has a worker's
    share of its host (`cpusPerWorker`, or spark.task.cpus), not all of it.

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
    schedule, strategy = fit.plan.schedule, fit.strategy
    probe = Probe(
        fit.plan.task,
        schedule.batch_size * schedule.accumulate,
        steps,
        strategy.wire_topology,
    )
    options = replace(fit.options, max_restarts=0, name="sparkdml: advise")
    if max_workers is not None:
        options = replace(options, num_workers=max_workers)
    began = time.monotonic()
    found: list[Found] = launch(
        LaunchRequest(fit.spark, probe, options, data=fit.dataset, feed=fit.feed)
    )
    return Advice(combine(found, time.monotonic() - began, probe.batch_size), schedule.epochs)


def combine(found: list[Found], seconds: float, batch_size: int) -> Measured:
    """Combine all ranks' measurements, and the job's seconds, for the cost model."""
    rows = sum(one.rows for one in found)
    if not rows:
        raise DataError(NO_ROWS)
    stepped = tuple(one.step for one in found if one.step is not None)
    if not stepped:
        raise DataError(
            f"none of {len(found)} workers has a batch, so there is no step to measure: one takes "
            f"{batch_size:,} rows (batchSize, times gradientAccumulation), and dropLast=True "
            "leaves out what is shorter, samplingCol= what is not drawn. Lower batchSize or "
            "max_workers"
        )
    last = max(found, key=lambda one: one.large)
    return Measured(
        rows=rows,
        batch_size=batch_size,
        model_bytes=last.model_bytes,
        step_alone=next(one.alone for one in found if one.alone is not None),
        concurrent_steps=stepped,
        max_workers=len(found),
        hand_over=max(0.0, seconds - max(one.seconds for one in found)),
        network=Network.fit(len(found), last.small, last.large, last.model_bytes),
        topology=last.topology,
    )
