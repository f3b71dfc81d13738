"""A worker's pull of the model, behind its computation where the consistency model allows that.

With overlap a worker does not wait for the pull that follows a push. It computes on the model it
has, if that is within the bound, after making its own last step on it, so that it reads its own
writes as it would from the servers. It waits for the pull before its next push. So at most one is
under way, and a step takes as long as the gradient or the messages take, not both.

Runs on the worker's thread; the messages arrive on those of its client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.client.requests import PartsTicket
from sparkdml.parameter_server.model_tables import ServedTables
from sparkdml.parameter_server.optimizers import SGD, Updater

SUMS = "sums"  # the table of all workers' stats
# A share of the time of a gradient: a pull may take this long before an older model is used.
PATIENCE = 0.05


class ModelPull:
    """
    Args:
        tables: of the model.
        values: where the model is put.
        sums: where the sums of all workers' stats are put.
        overlaps: whether a gradient may be computed before the pull has arrived.
    """

    def __init__(self, tables: ServedTables, values: Tensor, sums: Tensor, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.gradient_seconds = 0.0  # what the last one took
        self._tables, self._values, self._sums = tables, values, sums
        # What the servers hold lies in this process's memory, whatever device computes.
        self._pulled_values = torch.empty_like(values, device="cpu")
        self._pulled_sums = torch.empty_like(sums)
        self._tickets: list[PartsTicket[Tensor]] = []

    def begin(self, client: WorkerClient) -> None:
        self._tickets = self._tables.pull(client, self._pulled_values)
        self._tickets.append(client.pull(SUMS, out=self._pulled_sums))

    def end(self) -> None:
        """Wait for the pull, if one is under way, and put the model in place."""
        if not self._tickets:
            return
        for ticket in self._tickets:
            ticket.wait()
        self._tickets = []
        self._values.copy_(self._pulled_values)
        self._sums.copy_(self._pulled_sums)

    def drop(self) -> None:
        """Forget the pull that is under way."""
        self._tickets = []

    def prepare_gradient(self, client: WorkerClient) -> None:
        """Before a gradient: the model may be as old as the bound allows, and no older."""
        if not self._tickets:
            return
        soon = PATIENCE * self.gradient_seconds
        has_arrived = all(ticket.wait_a_little(soon) for ticket in self._tickets)
        if has_arrived or not self._tables.read_again(client):
            self.end()


def make_own_step(values: Tensor, grads: Tensor, weight: float, updater: Updater) -> None:
    """Make the servers' step of a push locally: for plain SGD, which has no state."""
    assert isinstance(updater, SGD)
    if weight:
        SGD(updater.lr, weight_decay=updater.weight_decay).update(values, grads / weight, {})
