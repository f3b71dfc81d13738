"""Checkpoints within an epoch, which only workers that step together can take: those under BSP.

After a clock of BSP all workers have read the same sums, and the next push of none of them can
change what the servers hold before all have pushed. So the votes among those sums tell every worker
that a checkpoint is due, and it shows one moment: the tables as rank 0 reads them, and each
worker's position in its rows. No worker may leave the clocks early for that: those without rows
make empty steps until no worker has a row. And all must be after the same step: a worker that was
restarted or declared dead objects until the epoch's end, when all are together again. Under the
other models workers are never together within an epoch, and checkpoints are taken at its end alone.

Runs on the worker's thread.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.model_pull import SUMS
from sparkdml.training.task import Task
from sparkdml.training.totals import Totals


class Lockstep:
    """Whether a worker is in step with the others. Where it does not apply, it changes nothing.

    Args:
        task: votes with its gradients.
        sums: of all workers' stats, as they were last pulled.
        applies: whether checkpoints are taken within epochs at all.
    """

    def __init__(self, task: Task, sums: Tensor, applies: bool) -> None:
        self.applies = applies
        self.has_rows = False  # whether any worker had one in the last step
        self._task, self._sums = task, sums
        self._is_in_step = False
        self._clock = 0
        self._sums_before = sums.clone()

    def begin_epoch(self, client: WorkerClient, is_in_step: bool) -> None:
        self._is_in_step = is_in_step
        self._clock, self._sums_before = client.clock_now, self._sums.clone()

    def object_if_behind(self) -> None:
        """Before a gradient, with whose stats the votes travel."""
        if self.applies and not self._is_in_step:
            wish, _, stop = self._task.vote
            self._task.vote = (wish, 1.0, stop)

    def agreed(self, client: WorkerClient, own: Totals) -> Totals:
        """After a step: the totals of all workers, or this worker's own where they are apart.

        Without the request to end the run, which `ServedTraining` handles.
        """
        if not self.applies:
            return own.without_votes()
        clock, sums = client.clock_now, self._sums
        totals = self._task.totals(sums - self._sums_before)
        self.has_rows = bool(totals.rows)
        if clock != self._clock + 1 or client.stamp(SUMS) != clock:
            self._is_in_step = False  # the others have made steps without it
        self._clock, self._sums_before = clock, sums.clone()
        if not self._is_in_step:
            return own.without_votes()
        return replace(totals, stops=0.0)
