"""Where a worker is: its progress, kept on the servers, and whether it is in step with the others.

A step is pushed to several tables, whose parts lie on several servers, and a worker may die between
any two of these pushes. So all pushes of a step bear the step's mark, which keeps growing after a
restart, and a part accepts each mark once (see `stored_partition.py`). A restarted worker repeats
the last step that its row of this table records: the same rows under the same mark. Parts that have
this push ignore it, and the others apply it; later steps that the row does not record yet are
repeated in the same way. So each batch counts once despite restarts.

Checkpoints within an epoch can only be taken by workers that step together: those under BSP. After
a clock of BSP all workers have read the same sums, and the next push of none of them can change
what the servers hold before all have pushed. So the votes among those sums tell every worker that a
checkpoint is due, and it shows one moment: the tables as rank 0 reads them, and each worker's
position in its rows. No worker may leave the clocks early for that: those without rows make empty
steps until no worker has a row. And all must be after the same step: a worker that was restarted or
declared dead objects until the epoch's end, when all are together again. Under the other models
workers are never together within an epoch, and checkpoints are taken at its end alone.

Runs on the worker's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.model_tables import SUMS
from sparkdml.parameter_server.optimizers import Add
from sparkdml.training.task import Task
from sparkdml.training.totals import Totals

PROGRESS = "progress"


def mark_of_step(step: int) -> int:
    return 2 * step


def mark_of_start(step: int) -> int:
    """The progress at the start of an epoch."""
    return 2 * step + 1


@dataclass(frozen=True)
class Place:
    """After a push: where in the data and in the run a worker is."""

    epoch: int = 0
    rows: int = 0  # of this epoch, since the run began or was resumed
    step: int = 0
    last_rows: int = 0  # of the last push in this epoch, if there was one
    last_steps: int = 0

    def to_tensor(self) -> Tensor:
        fields = [self.epoch, self.rows, self.step, self.last_rows, self.last_steps]
        return torch.tensor([fields], dtype=torch.float64)

    @property
    def before_last(self) -> Place:
        """From where the last push can be made again."""
        return Place(self.epoch, self.rows - self.last_rows, self.step - self.last_steps)

    def after(self, rows: int, steps: int) -> Place:
        return Place(
            self.epoch, self.rows + rows, step=self.step + steps, last_rows=rows, last_steps=steps
        )


def nowhere(num_workers: int) -> Tensor:
    """The whole table, before any worker has made a step."""
    return Place().to_tensor().repeat(num_workers, 1)


def furthest(progress: Tensor) -> Place:
    """Of all workers."""
    return Place(*(int(value) for value in progress.max(0).values))


class Progress:
    """One worker's row of the table."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.place = Place()

    def init(self, client: WorkerClient) -> None:
        client.init(PROGRESS, nowhere(self._size), rows=True, updater=Add(), exact=True)

    def read(self, client: WorkerClient) -> Place:
        """Return this worker's recorded progress, which can't be lost with a server."""
        nothing = self.place.to_tensor().zero_()
        # Acknowledged when every replica has it, and so all that was pushed before.
        client.push(PROGRESS, nothing, rows=[self._rank]).wait()
        row = client.pull(PROGRESS, rows=[self._rank]).wait().view(-1)
        self.place = Place(*(int(value) for value in row))
        return self.place

    def tell(self, client: WorkerClient, place: Place, mark: int) -> None:
        change = place.to_tensor() - self.place.to_tensor()
        self.place = place
        client.push(PROGRESS, change, rows=[self._rank], mark=mark)


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
