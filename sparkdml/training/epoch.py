"""One pass over the data, as the strategy's loop sees it: batches in, counted steps out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from sparkdml.errors import NonFiniteLoss
from sparkdml.feed.batch import Batch
from sparkdml.feed.order import Ints
from sparkdml.training.task import Totals

if TYPE_CHECKING:
    from sparkdml.training.training import Training


class Epoch:
    """Iterate over it for batches; it never ends by itself."""

    def __init__(self, training: Training, number: int) -> None:
        self._training = training
        self.number = number
        self.totals = Totals()
        self.steps = 0
        self.measured: dict[str, float] = {}  # what the strategy adds to the row, on every rank
        self.rows_here = 0  # that this rank has trained on since the epoch began here
        # Before that, in a run that was resumed; where the number of ranks has changed, the mean of
        # what they had, which may be a fraction of a row.
        self.rows_before = 0.0
        # Of this rank's shards: how many rows anybody has used since it began here, if not just
        # this rank has.
        self.used_rows: int | None = None
        self.start: Ints | None = None  # where in the data it begins, if not at its start
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._batch_rows = 0
        self._checkpoint_is_due = False
        self._stop_is_agreed = False
        self._source: Iterator[Batch] = iter(())
        self._ahead: Batch | None = None  # read already, for the next step

    @classmethod
    def load(
        cls, training: Training, state: dict[str, Any], position: Ints, rows_before: float
    ) -> Epoch:
        """The epoch that a checkpoint was taken in, from there on."""
        epoch = cls(training, state["number"])
        epoch.totals = Totals.load(state["totals"])
        epoch.steps = state["steps"]
        epoch._seconds_before = state["seconds"]
        epoch.measured = dict(state.get("measured", {}))  # which older checkpoints have not
        epoch.rows_before = rows_before
        epoch.start = position if position.any() else None
        return epoch

    def state(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "totals": asdict(self.totals),
            "steps": self.steps,
            "seconds": self.seconds,
            "measured": self.measured,
        }

    @property
    def own_rows(self) -> float:
        """Of this rank, for its weight among the others."""
        return self.rows_before + self.rows_here

    @property
    def rows_read(self) -> int:
        """How many rows of this rank's shards have been used since the epoch began here."""
        return self.rows_here if self.used_rows is None else self.used_rows

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def rows_in_all(self) -> int | None:
        """How many rows all ranks train on, where Spark has counted them."""
        return self._training.rows_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, then empty ones: other ranks may have more."""
        training = self._training
        training.spans.start_step(training.step + 1)
        self._source, self._ahead = chain(self._feed(), repeat(Batch.empty())), None
        try:
            while not (training.is_replayed or training.is_interrupted):
                batch = next(self._source) if self._ahead is None else self._ahead
                self._ahead = None
                self._batch_rows = 0
                self._take(batch)
                self._vote()
                for callback in training.step_start_callbacks:
                    callback.on_step_start(training)
                yield batch
                training.spans.start_step(training.step + 1)
        finally:
            self._source = iter(())  # the feed may stop reading

    def read_ahead(self) -> None:
        """Read the next step's batch now, while others are busy; it counts when its step comes.

        To be called in the midst of communication.
        """
        if self._ahead is None:
            clock, spans = self._training.clock, self._training.spans
            clock.lap("communication")
            spans.lap("communication")
            self._ahead = next(self._source, None)
            clock.lap("data")
            spans.lap("feed wait")

    def begin_step(self) -> None:
        """For strategies whose steps take whole passes: a step begins."""
        training = self._training
        training.spans.start_step(training.step + 1)
        for callback in training.step_start_callbacks:
            callback.on_step_start(training)

    def whole_pass(self) -> Iterator[Batch]:
        """What this rank has of all rows, and no empty batches."""
        training = self._training
        self.rows_here, self.rows_before = 0, 0.0
        self._vote()
        vote, training.task.vote = training.task.vote, (0.0, 0.0, 0.0)  # not with every batch
        for batch in self._feed():
            training.clock.lap("data")
            training.spans.lap("feed wait")
            self.rows_here += batch.num_rows
            yield batch
        self._batch_rows = self.rows_here
        training.task.vote = vote
        self.measured["passes"] = self.measured.get("passes", 0.0) + 1.0

    def check_finite(self, totals: Totals, own_loss: float | None = None) -> None:
        """Every rank has the same totals, and raises alike.

        `own_loss` is what this rank brought to them, if not just the loss of its last batch.
        """
        if not math.isfinite(totals.loss):
            self._not_finite(totals.loss, own_loss)

    def rounds(self, num_batches: int) -> Iterator[Iterator[Batch]]:
        """This rank's batches, up to so many at a time, then none: other ranks may have more.

        For ranks that take steps of their own between two meetings. What lies between two meetings
        is one step to all else: it is counted, voted on and ticked once.
        """
        own = self._feed()
        return self.rounds_of(islice(own, num_batches) for _ in repeat(None))

    def rounds_of(self, rounds: Iterator[Iterator[Batch]]) -> Iterator[Iterator[Batch]]:
        """The same, of batches that come in rounds by themselves."""
        training = self._training
        training.spans.start_step(training.step + 1)
        while not (training.is_replayed or training.is_interrupted):
            self._batch_rows = 0
            for callback in training.step_start_callbacks:
                callback.on_step_start(training)
            yield self._round(next(rounds))
            training.spans.start_step(training.step + 1)

    def _round(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._take(batch)
            yield batch
        self._vote()  # as late as can be: a round may be long

    def _feed(self) -> Iterator[Batch]:
        assert self._training.strategy is not None
        return self._training.strategy.batches(self._training, self)

    def _take(self, batch: Batch) -> None:
        self._training.clock.lap("data")
        self._training.spans.lap("feed wait")
        self.rows_here += batch.num_rows
        self._batch_rows += batch.num_rows

    def count(self, totals: Totals) -> bool:
        """Account for the agreed totals of a step; False when no rank had a row: it is over."""
        self._stop_is_agreed = bool(totals.stops)
        if not totals.rows:
            self._training.spans.end_step("end of epoch")
            if self._stop_is_agreed:
                self._training.interrupt()
            return False
        self.check_finite(totals)
        self.totals += totals
        self.steps += 1
        self._checkpoint_is_due = bool(totals.wishes) and not totals.objections
        loss = totals.mean_loss
        self._training.reports.count(self._training.step + 1, loss)
        if self._training.schedule.stop_at_step is not None:
            self._training.losses.append(loss)
        return True

    def tick(self) -> None:
        """A step is done."""
        training = self._training
        training.step += 1
        training.ctx.reached(training.step)
        if not training.first_step_time:
            training.first_step_time = time.time()
        for callback in training.step_callbacks:
            callback.on_step_end(training)
        if training.step_callbacks:
            training.spans.lap("callbacks")
        training.spans.end_step()
        training.clock.lap("compute")
        if self._checkpoint_is_due and not self._stop_is_agreed:  # which has one of its own
            self._checkpoint_is_due = False
            training.save(self, "step")
            training.clock.lap("checkpoint")
        training.reports.tick(self, self._batch_rows)
        self._batch_rows = 0  # reported; another step may come without a batch
        if self._stop_is_agreed:
            training.interrupt()

    def _vote(self) -> None:
        """Rank 0's clock says when a checkpoint is due; any rank may object that it is busy.

        Any rank may ask for the run's end.
        """
        training, checkpoint = self._training, self._training.checkpoint
        stops = float(training.stop_request is not None)
        if checkpoint is None or not checkpoint.writes:
            training.task.vote = (0.0, 0.0, stops)
            return
        wish = training.ctx.rank == 0 and checkpoint.due(training.step + 1)
        training.task.vote = (float(wish), float(checkpoint.busy), stops)

    def _not_finite(self, loss: float, own_loss: float | None) -> NoReturn:
        """Every rank sees the same total, so every rank asks whose it is, and says the same."""
        training, ctx = self._training, self._training.ctx
        own = training.task.forward.last_loss if own_loss is None else own_loss
        mine = torch.tensor([0.0 if own is None else float(own)], device=ctx.device)
        losses = torch.cat(ctx.comm.allgather(mine)).tolist()
        rank = next((r for r, value in enumerate(losses) if not math.isfinite(value)), 0)
        if ctx.comm.size != ctx.size:
            rank = ctx.rank  # it trains by itself, and has seen no loss but its own
        raise NonFiniteLoss(loss, self.number + 1, training.step + 1, rank)
