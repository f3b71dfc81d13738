"""One pass over the data, as the strategy's loop sees it: batches in, counted steps out.

Belongs to the loop of one worker and runs on its thread. It reads from the source of batches that
the strategy has given, and does what belongs to every step: callbacks, votes, counts, checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import NoReturn

import torch

from sparkdml.errors import NonFiniteLoss
from sparkdml.feed.batch import Batch
from sparkdml.training.run import TrainingRun
from sparkdml.training.totals import EpochProgress, Totals


class Epoch(EpochProgress):
    """Iterate over it for batches; it never ends by itself.

    Args:
        run: what the steps count into.
        at: which epoch, and where in it to begin.
        batches: this rank's batches of the epoch, or of one pass over it.
        save: takes a checkpoint, on every rank after the same step.
    """

    def __init__(
        self,
        run: TrainingRun,
        at: EpochProgress,
        batches: Callable[[Epoch], Iterator[Batch]],
        save: Callable[[Epoch], None],
    ) -> None:
        super().__init__(at.number, at.start, at.rows_before)
        self._run, self._batches, self._save = run, batches, save
        self._batch_rows = 0
        self._checkpoint_is_due = False
        self._stop_is_agreed = False

    @property
    def _is_over(self) -> bool:
        return self._run.is_replayed or self._run.is_interrupted

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, then empty ones: other ranks may have more."""
        self._run.spans.start_step(self._run.step + 1)
        source = chain(self._batches(self), repeat(Batch.empty()))
        while not self._is_over:
            batch = next(source)
            self._batch_rows = 0
            self._take(batch)
            self._vote()
            self._start_step()
            yield batch
            self._run.spans.start_step(self._run.step + 1)

    def begin_step(self) -> None:
        """For strategies whose steps take whole passes: a step begins."""
        self._run.spans.start_step(self._run.step + 1)
        self._start_step()

    def whole_pass(self) -> Iterator[Batch]:
        """What this rank has of all rows, and no empty batches."""
        run = self._run
        self.rows_here, self.rows_before = 0, 0.0
        self._vote()
        vote, run.task.vote = run.task.vote, (0.0, 0.0, 0.0)  # not with every batch
        for batch in self._batches(self):
            run.clock.lap("data")
            run.spans.lap("feed wait")
            self.rows_here += batch.num_rows
            yield batch
        self._batch_rows = self.rows_here
        run.task.vote = vote
        self.measured["passes"] = self.measured.get("passes", 0.0) + 1.0

    def check_finite(self, totals: Totals, own_loss: float | None = None) -> None:
        """Every rank has the same totals, and raises alike.

        `own_loss` is what this rank brought to them, if not just the loss of its last batch.
        """
        if not math.isfinite(totals.loss):
            self._raise_not_finite(totals.loss, own_loss)

    def rounds(self, num_batches: int) -> Iterator[Iterator[Batch]]:
        """This rank's batches, at most `num_batches` at a time, then none: others may have more.

        For ranks that take local steps between two synchronizations. What lies between two of them
        is one step to all else: it is counted, voted on and ticked once.
        """
        own = self._batches(self)
        return self.rounds_of(islice(own, num_batches) for _ in repeat(None))

    def rounds_of(self, rounds: Iterator[Iterator[Batch]]) -> Iterator[Iterator[Batch]]:
        """The same, of batches that come in rounds by themselves."""
        self._run.spans.start_step(self._run.step + 1)
        while not self._is_over:
            self._batch_rows = 0
            self._start_step()
            yield self._round(next(rounds))
            self._run.spans.start_step(self._run.step + 1)

    def _round(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._take(batch)
            yield batch
        self._vote()  # as late as can be: a round may be long

    def _start_step(self) -> None:
        for hook in self._run.on_step_start:
            hook()

    def _take(self, batch: Batch) -> None:
        self._run.clock.lap("data")
        self._run.spans.lap("feed wait")
        self.rows_here += batch.num_rows
        self._batch_rows += batch.num_rows

    def count(self, totals: Totals) -> bool:
        """Account for the agreed totals of a step; False when no rank had a row: it is over."""
        run = self._run
        self._stop_is_agreed = bool(totals.stops)
        if not totals.rows:
            run.spans.end_step("end of epoch")
            if self._stop_is_agreed:
                run.interrupt()
            return False
        self.check_finite(totals)
        self.totals += totals
        self.steps += 1
        self._checkpoint_is_due = bool(totals.wishes) and not totals.objections
        loss = totals.mean_loss
        run.reports.count(run.step + 1, loss)
        if run.schedule.stop_at_step is not None:
            run.losses.append(loss)
        return True

    def tick(self) -> None:
        """A step is done."""
        run = self._run
        run.step += 1
        run.ctx.reached(run.step)
        if not run.first_step_time:
            run.first_step_time = time.time()
        for hook in run.on_step_end:
            hook()
        if run.on_step_end:
            run.spans.lap("callbacks")
        run.spans.end_step()
        run.clock.lap("compute")
        if self._checkpoint_is_due and not self._stop_is_agreed:  # which has one of its own
            self._checkpoint_is_due = False
            self._save(self)
            run.clock.lap("checkpoint")
        run.reports.tick(self, self._batch_rows)
        self._batch_rows = 0  # reported; another step may come without a batch
        if self._stop_is_agreed:
            run.interrupt()

    def _vote(self) -> None:
        """Rank 0's clock says when a checkpoint is due; any rank may object that it is busy.

        Any rank may ask for the run's end.
        """
        run, checkpoint = self._run, self._run.checkpoint
        stops = float(run.stop_request is not None)
        if checkpoint is None or not checkpoint.writes:
            run.task.vote = (0.0, 0.0, stops)
            return
        wish = run.ctx.rank == 0 and checkpoint.due(run.step + 1)
        run.task.vote = (float(wish), float(checkpoint.busy), stops)

    def _raise_not_finite(self, loss: float, own_loss: float | None) -> NoReturn:
        """Every rank sees the same total, so every rank asks whose it is, and raises the same."""
        ctx = self._run.ctx
        own = self._run.task.forward.last_loss if own_loss is None else own_loss
        mine = torch.tensor([0.0 if own is None else float(own)], device=ctx.device)
        losses = torch.cat(ctx.comm.allgather(mine)).tolist()
        rank = next((r for r, value in enumerate(losses) if not math.isfinite(value)), 0)
        if ctx.comm.size != ctx.size:
            rank = ctx.rank  # it trains by itself, and has seen no loss but its own
        raise NonFiniteLoss(loss, self.number + 1, self._run.step + 1, rank)
