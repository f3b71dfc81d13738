"""An epoch's row of the history: what was measured in training and in validation, over all ranks.

Every rank calls these functions at the same moment, and gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.training.buffers import merge_buffers

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch
    from sparkdml.training.training import Training

NO_VALIDATION_ROWS = (
    "validation= selected no rows. Use a larger fraction, or a column that is true for some of them"
)


def make_row(training: Training, epoch: Epoch) -> dict[str, float]:
    seconds = epoch.seconds  # of training alone
    task, totals = training.task, epoch.totals
    with training.spans.span("merge buffers"):
        merge_buffers(task.module, training.ctx.comm, epoch.own_rows)
    row = {"epoch": float(epoch.number + 1), **task.forward.means(totals)}
    row.update(_compute_objects(training))
    if training.schedule.validates:
        with training.spans.span("validation"), training.result_values_in_place():
            batches = training.ctx.data.validation_batches(training.schedule.batch_size)
            row.update(validate(training, batches))
    if task.loss_scale is not None:
        row["loss_scale"] = task.loss_scale.value
        row["skipped_steps"] = float(task.loss_scale.skipped_steps)
    row.update(epoch.measured)
    row["rows"], row["steps"] = totals.rows, float(epoch.steps)
    row["seconds"], row["rows_per_second"] = seconds, totals.rows / max(seconds, 1e-9)
    return row


def validate(training: Training, batches: Iterable[Batch]) -> dict[str, float]:
    """What is measured on this rank's batches and those of the others, as the history has it."""
    forward, ctx = training.task.forward, training.ctx
    trained_on, forward.metric_objects = forward.metric_objects, forward.metric_objects.fresh()
    stats = forward.evaluate(batches)
    totals = forward.totals(ctx.comm.allreduce_(stats))
    if not totals.rows:
        raise DataError(NO_VALIDATION_ROWS)
    row = {**forward.means(totals), **_compute_objects(training)}
    forward.metric_objects = trained_on
    return {f"val_{name}": value for name, value in row.items()}


def _compute_objects(training: Training) -> dict[str, float]:
    """The values of torchmetrics objects; they begin anew."""
    objects = training.task.forward.metric_objects
    if not objects:
        return {}
    values = objects.compute(objects.gather(training.ctx.comm, training.ctx.device))
    objects.reset()
    return values
