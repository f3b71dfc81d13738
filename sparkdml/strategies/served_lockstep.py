"""Checkpoints within an epoch, of workers that go in step: under BSP.

After a clock of BSP everybody has read the same sums, and nobody's next push can change what the
servers hold before all have pushed. So the votes among those sums say to everybody alike that a
checkpoint is due, and it is of one moment: the tables as rank 0 reads them, and each worker's place
in its rows. For that nobody may leave: workers without a row attend until no one has any. And all
must be after the same step: one that came back, or was taken for dead, objects until the epoch's
end, when they are together again. Under the other models workers are never together within an
epoch, so checkpoints are taken at its end alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sparkdml.strategies.served_fetching import SUMS
from sparkdml.training.totals import Totals

if TYPE_CHECKING:
    from sparkdml.strategies.served_training import ServedTraining


class Lockstep:
    """Belongs to a worker. Where it does not apply, it changes nothing."""

    def __init__(self, worker: ServedTraining) -> None:
        self._worker = worker
        strategy, checkpoint = worker.strategy, worker.training.checkpoint
        self.applies = (
            strategy.consistency.aggregates
            and strategy.expulsion is None
            and checkpoint is not None
            and checkpoint.writes
        )
        self._is_in_step = False
        self._clock = 0
        self._sums = worker.sums.clone()
        self.anybody_has_rows = False  # in the last step

    def begin_epoch(self, is_in_step: bool) -> None:
        self._is_in_step = is_in_step
        self._clock = self._worker.client.clock_now
        self._sums = self._worker.sums.clone()

    def object_if_behind(self) -> None:
        """Before a gradient, with whose stats the votes travel."""
        if self.applies and not self._is_in_step:
            wish, _, stop = self._worker.task.vote
            self._worker.task.vote = (wish, 1.0, stop)

    def agreed(self, own: Totals) -> Totals:
        """After a step: what all have brought to it; only this worker's own, where they are apart.

        Without the wish for the run's end, of which `ServedTraining` takes care.
        """
        if not self.applies:
            return own.without_votes()
        worker = self._worker
        clock, sums = worker.client.clock_now, worker.sums
        totals = worker.task.forward.totals(sums - self._sums)
        self.anybody_has_rows = bool(totals.rows)
        if clock != self._clock + 1 or worker.client.stamp(SUMS) != clock:
            self._is_in_step = False  # the others have gone on without it
        self._clock, self._sums = clock, sums.clone()
        if not self._is_in_step:
            return own.without_votes()
        return replace(totals, stops=0.0)
