"""`dryRun=True`: trains on a few rows in the driver before any worker is started.

The rows pass through preprocess, collate, module, loss or step, metrics and backward, on a pickled
copy of the plan, so objects that can't be pickled are found as well. Nothing is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparkdml.errors import DataError, DryRunError, SparkDMLError
from sparkdml.feed.arrow import read_arrow
from sparkdml.feed.batch import Batch
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Feed
from sparkdml.feed.plan import FeedPlan
from sparkdml.feed.randomness import random_state, restore_random_state, seed_everything
from sparkdml.feed.sharding import hashed
from sparkdml.runtime.protocol.blobs import pack, unpack
from sparkdml.runtime.worker.context import NO_ROWS
from sparkdml.training.task import Task, TaskPlan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.fitting.fit import Fit

NUM_ROWS = 8


def try_rows(fit: Fit) -> None:
    """Raise a DryRunError that names the stage that failed, and the shapes of the batch."""
    stage, shapes = "the columns of the first rows", ""
    try:
        batch = first_batch(fit.dataset, fit.feed, min(NUM_ROWS, fit.plan.schedule.batch_size))
        shapes = f" with {describe_batch(batch)}"
        stage = "shipping the model, the loss and the optimizer"
        plan = copied(fit.plan.task)
        with kept_randomness():
            seed_everything(fit.options.seed)
            stage = "making the model and its optimizer"
            task = Task(plan, torch.device("cpu"))
            task.forward.context.training = True
            stage = "the model, its loss and their gradients"
            task.grad(batch)
            if fit.plan.schedule.validates:
                stage = "validation"
                task.forward.evaluate([batch])
    except SparkDMLError:
        raise  # already describes the problem
    except Exception as error:
        raise DryRunError(
            f"dryRun: {stage} failed{shapes}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Restore the state of the caller's random number generators afterwards."""
    state = random_state(torch.device("cpu"))
    try:
        yield
    finally:
        restore_random_state(state, torch.device("cpu"))


def first_batch(dataset: DataFrame, feed: FeedPlan, num_rows: int) -> Batch:
    """Return a batch as a worker would see it, but without a split, sampling or minimum size."""
    plan = replace(
        feed,
        validation=None,
        stratify=None,
        strata=None,
        sampling=None,
        drop_last=False,
    )
    table = hashed(dataset, plan).limit(num_rows).toArrow()
    with tempfile.TemporaryDirectory(prefix="sparkdml-dry-run-") as folder:
        rows = Feed(read_arrow(iter(table.to_batches()), plan), plan, folder)
        try:
            batch = next(rows.batches(BatchRequest(num_rows)), None)
        finally:
            rows.close()
    if batch is None:
        raise DataError(NO_ROWS)
    return batch


def copied(plan: TaskPlan) -> TaskPlan:
    """Return a pickled copy as a worker would receive it, not compiled, as that takes longest."""
    pickled = pack(replace(plan, compile=False))
    buffers = [memoryview(bytearray(buffer)) for buffer in pickled.buffers]
    result: TaskPlan = unpack(pickled.pickled, buffers)
    return result


def describe_batch(batch: Batch) -> str:
    """Format every column's dtype and shape."""
    return ", ".join(
        f"{name} {str(batch[name].dtype).removeprefix('torch.')}{list(batch[name].shape)}"
        for name in batch
    )
