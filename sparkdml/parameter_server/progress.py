"""A worker's progress, kept on the servers, so that each batch counts once despite restarts.

A step is pushed to several tables, whose parts lie on several servers, and a worker may die between
any two of these pushes. So all pushes of a step bear the step's mark, which keeps growing after a
restart, and a part accepts each mark once (see `stored_partition.py`). A restarted worker
repeats the last step that its row of this table records: the same rows under the same mark. Parts
that have this push ignore it, and the others apply it; later steps that the row does not record yet
are repeated in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.optimizers import Add

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
