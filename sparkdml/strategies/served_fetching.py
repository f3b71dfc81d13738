"""The pull of the model, behind the computation where the consistency model allows it.

With overlap, a worker does not wait for the pull that follows a push. It goes on with the model it
has, if that is within the bound, after it has made its own last step on it: so it reads its own
writes, as it would from the servers. The pull is waited for before the next push, so there is one
under way at most, and a step takes as long as the gradient or the messages take, not both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparkdml.server.optimizers import SGD, Updater
from sparkdml.server.tickets import PartsTicket

if TYPE_CHECKING:
    from sparkdml.strategies.served_training import ServedTraining

SUMS = "sums"
# Of the time of a gradient: so long a pull may take before the worker goes on with an older model.
PATIENCE = 0.05


class Fetching:
    """Belongs to a worker, and runs on its thread."""

    def __init__(self, worker: ServedTraining, overlaps: bool) -> None:
        self._worker, self.overlaps = worker, overlaps
        params = worker.task.params
        # What the servers hold lies in this process's memory, whatever device computes.
        self._values = torch.empty_like(params.values, device="cpu")
        self._sums = torch.empty_like(worker.sums)
        self._tickets: list[PartsTicket[Tensor]] = []
        self.gradient_seconds = 0.0  # what the last one took

    def begin(self) -> None:
        client = self._worker.client
        self._tickets = self._worker.tables.pull(client, self._values)
        self._tickets.append(client.pull(SUMS, out=self._sums))

    def end(self) -> None:
        """Wait for the pull, if one is under way, and put the model in place."""
        if not self._tickets:
            return
        for ticket in self._tickets:
            ticket.wait()
        self._tickets = []
        self._worker.task.params.values.copy_(self._values)
        self._worker.sums.copy_(self._sums)

    def drop(self) -> None:
        """Nobody needs it any more."""
        self._tickets = []

    def ready_to_compute(self) -> None:
        """Before a gradient: the model may be as old as the bound allows, and no older."""
        if not self._tickets:
            return
        soon = PATIENCE * self.gradient_seconds
        is_there = all(ticket.wait_a_little(soon) for ticket in self._tickets)
        if is_there or not self._worker.tables.read_again(self._worker.client):
            self.end()


def make_own_step(values: Tensor, grads: Tensor, weight: float, updater: Updater) -> None:
    """What the servers make of a push, made here: of plain SGD, which remembers nothing."""
    assert isinstance(updater, SGD)
    if weight:
        SGD(updater.lr, weight_decay=updater.weight_decay).update(values, grads / weight, {})
