"""A worker that Spark has started again: where it was, as the servers and the driver know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.feed.order import Ints
from sparkdml.feed.position import nothing_read, owned
from sparkdml.strategies.served_progress import Place, mark_of_step
from sparkdml.training.epoch import Epoch

if TYPE_CHECKING:
    from sparkdml.strategies.served_training import ServedTraining
    from sparkdml.training.training import Training


def come_back(worker: ServedTraining) -> None:
    """Let its training begin with the last step that it made before it was lost."""
    place = worker.progress.place = _find_place(worker)
    if place == Place():
        return  # it had made none
    training, ctx = worker.training, worker.ctx
    training.step = place.step
    training.history = list(ctx.ask("history") or [])[: place.epoch]
    epoch = Epoch(training, place.epoch)
    start, rows_before = _where_resumed(training, place.epoch)
    epoch.rows_before = rows_before + place.rows
    epoch.start = start if start.any() else None
    if place.rows and worker.leases is None:
        ctx.data.ingest()
        epoch.start = ctx.data.position_after(
            place.rows, place.epoch, training.schedule.shuffle, start
        )
    training.first_epoch = epoch
    ctx.reached(place.step)


def _find_place(worker: ServedTraining) -> Place:
    place = worker.progress.read(worker.client)
    if worker.leases is None:
        return place.before_last
    # The desk has counted rows as used that the servers may never have heard of.
    repeated = worker.leases.repeat_last(place.epoch)
    return place.before_last if repeated == mark_of_step(place.step) else place


def _where_resumed(training: Training, number: int) -> tuple[Ints, float]:
    """Where in this epoch's rows the run had been resumed, and how many were read by then."""
    checkpoint = training.checkpoint
    state = None if checkpoint is None else checkpoint.load_entries()
    if state is None or state["progress"].value["epoch"]["number"] != number:
        return nothing_read(), 0.0
    position = owned(state["position"].value, training.ctx.rank, training.ctx.size)
    return position, float(state["own_rows"].value)
