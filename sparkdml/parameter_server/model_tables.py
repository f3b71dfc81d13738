"""The model as tables on the servers, and a worker's pull of it.

The flat parameters are one table, but for embeddings, which have rows. Of an embedding only the
rows that the batch touched are pushed: those with a gradient. Rows without one are left as they are
by plain SGD and by Adagrad anyway, so the result is the same. Momentum, weight decay and Adam move
them in a dense update; so with these an embedding goes by rows only if it was made with
`sparse=True`, whose rows torch, too, updates when they are touched.

For an evaluator, the servers also hold the model's buffers, such as BatchNorm's statistics. Every
worker has its own, and they are merged at the end of an epoch. Within an epoch those of the first
worker stand for all, as in other data-parallel training: with each gradient it pushes how much they
have changed, so that they belong to the same clock.

With overlap a worker does not wait for the pull that follows a push. It computes on the model it
has, if that is within the bound, after making its own last step on it, so that it reads its own
writes as it would from the servers. It waits for the pull before its next push. So at most one is
under way, and a step takes as long as the gradient or the messages take, not both.

Runs on the worker's thread; the messages arrive on those of its client.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparkdml.errors import CheckpointError
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.client.requests import PartsTicket
from sparkdml.parameter_server.optimizers import SGD, Adagrad, Add, Updater
from sparkdml.parameter_server.partition import Table
from sparkdml.training.flat import FlatParams

VALUES = "values"
SMALL_BYTES = 16 << 10  # an embedding that is smaller travels with all else


@dataclass(frozen=True)
class Stretch:
    """Parameters from `start` to `stop`, as a table; with a width, as one of rows."""

    name: str
    start: int
    stop: int
    width: int | None = None

    def view(self, flat: Tensor) -> Tensor:
        own = flat[self.start : self.stop]
        return own if self.width is None else own.view(-1, self.width)


class ServedTables:
    """How a model lies on the servers; the same at every worker."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self.names = [stretch.name for stretch in stretches]

    @classmethod
    def of(cls, module: nn.Module, params: FlatParams, updater: Updater) -> ServedTables:
        by_row = _embeddings(module, updater)
        stretches: list[Stretch] = []
        position = begun = 0

        def close_dense() -> None:
            if position > begun:
                number = sum(stretch.width is None for stretch in stretches)
                name = f"{VALUES}.{number}" if number else VALUES
                stretches.append(Stretch(name, begun, position))

        for parameter in params.parameters:
            stop = position + parameter.numel()
            name = by_row.get(id(parameter))
            if name is not None:
                close_dense()
                stretches.append(Stretch(f"rows of {name}", position, stop, parameter.shape[1]))
                begun = stop
            position = stop
        close_dense()
        return cls(stretches)

    def init(self, client: WorkerClient, values: Tensor, updater: Updater) -> None:
        for stretch in self._stretches:
            client.init(
                stretch.name, stretch.view(values), stretch.width is not None, updater=updater
            )

    def push(self, client: WorkerClient, grads: Tensor, weight: float, mark: int) -> None:
        for stretch in self._stretches:
            own = stretch.view(grads)
            if stretch.width is None:
                client.push(stretch.name, own, weight=weight, mark=mark)
            else:
                touched = own.ne(0).any(1).nonzero().view(-1)
                client.push(
                    stretch.name, own[touched], rows=touched.cpu(), weight=weight, mark=mark
                )

    def pull(self, client: WorkerClient, out: Tensor) -> list[PartsTicket[Tensor]]:
        return [client.pull(one.name, out=one.view(out)) for one in self._stretches]

    def layouts(self, values: Tensor, part_bytes: int) -> list[Table]:
        """Return the tables as a snapshot reader needs them."""
        return [
            Table.of(one.name, one.view(values), one.width is not None, part_bytes)
            for one in self._stretches
        ]

    def join(self, tables: Mapping[str, Tensor], out: Tensor) -> None:
        """Assemble the parameters from the tables that were read."""
        for one in self._stretches:
            one.view(out).copy_(tables[one.name])

    def read_again(self, client: WorkerClient) -> bool:
        """Whether the last read of every table is within the bound."""
        return all(client.read_again(name) for name in self.names)

    def check(self, snapshot: Container[str]) -> None:
        """A checkpoint of the same model and optimizer has the same tables."""
        missing = [name for name in self.names if name not in snapshot]
        if missing:
            raise CheckpointError(
                f"the checkpoint's tables were divided differently: {', '.join(missing)} is not "
                "among them. Use a new path"
            )


def _embeddings(module: nn.Module, updater: Updater) -> dict[int, str]:
    """Those that go by rows: a parameter's id, and its name."""
    leaves_rows = (
        isinstance(updater, SGD) and not updater.momentum and not updater.weight_decay
    ) or (isinstance(updater, Adagrad) and not updater.weight_decay)
    found = {}
    for path, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and (part.sparse or leaves_rows):
            weight = part.weight
            if weight.requires_grad and weight.nbytes >= SMALL_BYTES:
                found[id(weight)] = f"{path}.weight" if path else "weight"
    return found


BUFFERS = "buffers"


def flat_buffers(module: nn.Module) -> Tensor | None:
    """Those that are not whole numbers, one behind the other; None if there are none."""
    found = [buffer.detach().reshape(-1) for buffer in _floating(module)]
    return torch.cat([each.to("cpu", torch.float64) for each in found]) if found else None


def load_buffers(module: nn.Module, flat: Tensor) -> None:
    """The inverse."""
    start = 0
    for buffer in _floating(module):
        stop = start + buffer.numel()
        buffer.copy_(flat[start:stop].view(buffer.shape))
        start = stop


def _floating(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


class ReportedBuffers:
    """The first worker's buffers, as far as it has pushed them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._initial = module, flat_buffers(module)
        self._reported = self._initial
        self._client: WorkerClient | None = None

    def tell(self, client: WorkerClient) -> None:
        """Push the changes before a clock ends; each epoch may have another client."""
        if self._initial is None:
            return
        if client is not self._client:
            self._client = client
            client.init(BUFFERS, self._initial, updater=Add(), exact=True)
            self._reported = client.pull(BUFFERS).wait().clone()
        now = flat_buffers(self._module)
        assert now is not None
        assert self._reported is not None
        # Infinities that stay, as in masks, are no change; their difference would be NaN.
        change = torch.where(now == self._reported, 0.0, now - self._reported)
        self._reported = now
        if change.any():  # most models have none, or constant ones
            client.push(BUFFERS, change)


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
