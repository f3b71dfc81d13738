"""An epoch's row of the history: what was measured in training and in validation, over all ranks.

Runs in each worker at an epoch's end, on the loop's thread. Every rank calls these functions at the
same moment and gets the same numbers. A module's buffers (BatchNorm's statistics and the like),
which each rank has changed by itself, are merged here too, before the model is validated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparkdml.comm.base import Communicator
from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.history_columns import VALIDATION

if TYPE_CHECKING:
    from sparkdml.training.run import TrainingRun
    from sparkdml.training.totals import EpochProgress


def merge_buffers(module: nn.Module, comm: Communicator, rows: float) -> None:
    """Make buffers alike: the mean, weighted by the rows that each rank saw; integers by rank 0.

    Those that are alike already stay as they are, to the bit: masks, positions, and other
    constants.
    """
    buffers = list(module.buffers())
    if not buffers or comm.size == 1:
        return
    changed = _that_differ(buffers, comm)
    floating = [buffer for buffer in changed if buffer.is_floating_point()]
    if floating:
        total = torch.tensor([rows], dtype=torch.float64, device=floating[0].device)
        total_rows = comm.allreduce_(total).item()
        if total_rows:
            for buffer in floating:
                # Not times 0, by which an infinity would become NaN on all ranks.
                buffer.mul_(rows / total_rows) if rows else buffer.zero_()
            comm.grouped_allreduce_(floating)
    for buffer in changed:
        if not buffer.is_floating_point():
            comm.broadcast_(buffer)


def _that_differ(buffers: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Those of which the ranks have different copies: told by a hash of each, not by the content.

    Every rank finds the same ones.
    """
    mine = torch.tensor([_hash(buffer) for buffer in buffers], device=buffers[0].device)
    hashes = zip(*(theirs.tolist() for theirs in comm.allgather(mine)), strict=True)
    return [buffer for buffer, own in zip(buffers, hashes, strict=True) if len(set(own)) > 1]


def _hash(tensor: Tensor) -> int:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().data
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


NO_VALIDATION_ROWS = (
    "validation= selected no rows. Use a larger fraction, or a column that is true for some of them"
)


def make_row(training: TrainingRun, epoch: EpochProgress) -> dict[str, float]:
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


def validate(training: TrainingRun, batches: Iterable[Batch]) -> dict[str, float]:
    """What is measured on this rank's batches and those of the others, as the history has it."""
    forward, ctx = training.task.forward, training.ctx
    trained_on, forward.metric_objects = forward.metric_objects, forward.metric_objects.fresh()
    stats = forward.evaluate(batches)
    totals = forward.totals(ctx.comm.allreduce_(stats))
    if not totals.rows:
        raise DataError(NO_VALIDATION_ROWS)
    row = {**forward.means(totals), **_compute_objects(training)}
    forward.metric_objects = trained_on
    return {f"{VALIDATION}{name}": value for name, value in row.items()}


def _compute_objects(training: TrainingRun) -> dict[str, float]:
    """The values of torchmetrics objects, which are then reset."""
    objects = training.task.forward.metric_objects
    if not objects:
        return {}
    values = objects.compute(objects.gather(training.ctx.comm, training.ctx.device))
    objects.reset()
    return values
