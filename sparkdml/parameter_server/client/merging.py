"""Merges the workers of one host: their updates are added up before they cross the network.

This is a tree of two levels, with the same sums in fewer and no larger messages: the ranks of a
host reduce their pushes through the host's communicator, in rank order, and the first rank alone is
a worker to the servers; it broadcasts what it pulls. Sums of gradients and sums of weights are
merged, never means. All ranks of the host make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.parameter_server.client.base import Client, Rows, Ticket
from sparkdml.parameter_server.client.requests import PartsTicket
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.partition import Table, as_indexes
from sparkdml.parameter_server.stats import ClientStats


class MergingClient(Client):
    """A `Client` for each rank of a host's communicator; rank 0 brings the real one.

    `comm` stays the caller's: it is not closed here.
    """

    def __init__(self, comm: Communicator, client: Client | None) -> None:
        if (client is None) != (comm.rank != 0):
            raise ParameterError("client", client, "given on rank 0, and None on the other ranks")
        self._comm, self._client = comm, client
        self._tables: dict[str, Table] = {}
        self.stats = client.stats if client is not None else ClientStats()
        self.worker = self._say(client.worker if client is not None else 0)
        self._clock = self._say(client.clock_now if client is not None else 0)

    def _say(self, number: int) -> int:
        """Rank 0's number, on every rank."""
        return int(self._comm.broadcast_(torch.tensor([number], dtype=torch.int64))[0])

    @property
    def clock_now(self) -> int:
        return self._clock

    def init(
        self,
        name: str,
        tensor: Tensor,
        rows: bool = False,
        updater: Updater | None = None,
        exact: bool = False,
    ) -> None:
        self._tables[name] = Table.of(name, tensor, rows)
        if self._client is not None:
            self._client.init(name, tensor, rows=rows, updater=updater, exact=exact)
        self._comm.barrier()

    def push(
        self, name: str, value: Tensor, rows: Rows | None = None, weight: float = 1.0
    ) -> Ticket[None]:
        table = self._table(name)
        value = value.detach().to("cpu", table.dtype)
        total = self._comm.reduce_(torch.tensor([weight], dtype=torch.float64))
        if rows is None:
            merged = self._comm.reduce_(value.clone(memory_format=torch.contiguous_format))
            if self._client is None:
                return PartsTicket(0, _nothing)
            return self._client.push(name, merged, None, float(total[0]))
        indexes = torch.from_numpy(as_indexes(rows, table.num_rows))
        all_rows = self._comm.gather(indexes)
        all_values = self._comm.gather(value.reshape(len(indexes), table.width))
        if self._client is None or all_rows is None or all_values is None:
            return PartsTicket(0, _nothing)
        joined = torch.cat(all_values).reshape(-1, *table.shape[1:])
        return self._client.push(name, joined, torch.cat(all_rows), float(total[0]))

    def pull(
        self, name: str, rows: Rows | None = None, out: Tensor | None = None
    ) -> Ticket[Tensor]:
        """Pull the whole table, or this rank's rows from those that the host's ranks need."""
        table = self._table(name)
        if rows is None:
            under_way = None if self._client is None else self._client.pull(name)

            def hand_out() -> Tensor:
                result = torch.empty(table.shape, dtype=table.dtype) if out is None else out
                if under_way is not None:
                    result.copy_(under_way.wait())
                self._comm.broadcast_(result)
                return result

            return _Later(hand_out)
        wanted = torch.from_numpy(as_indexes(rows, table.num_rows))
        named = torch.unique(torch.cat(self._comm.allgather(wanted)))
        some = None if self._client is None else self._client.pull(name, named)

        def choose() -> Tensor:
            found = torch.empty((len(named), *table.shape[1:]), dtype=table.dtype)
            if some is not None:
                found.copy_(some.wait())
            self._comm.broadcast_(found)
            own = found[torch.searchsorted(named, wanted)]
            return own if out is None else out.copy_(own)

        return _Later(choose)

    def clock(self) -> int:
        self._clock = self._say(self._client.clock() if self._client is not None else 0)
        return self._clock

    def barrier(self) -> None:
        if self._client is not None:
            self._client.barrier()
        self._comm.barrier()

    def set_optimizer(self, updater: Updater, names: Sequence[str] | None = None) -> None:
        if self._client is not None:
            self._client.set_optimizer(updater, names)
        self._comm.barrier()

    def snapshot(self) -> Mapping[str, Mapping[str, Any]]:
        """On rank 0; the others have nothing to save."""
        return {} if self._client is None else self._client.snapshot()

    def restore(self, snapshot: Mapping[str, Mapping[str, Any]]) -> None:
        if self._client is not None:
            self._client.restore(snapshot)
        self._comm.barrier()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def abort(self) -> None:
        if self._client is not None:
            self._client.abort()

    def _table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            known = ", ".join(map(repr, self._tables)) or "none yet"
            raise ParameterError("name", name, f"a table that init was called for ({known})")
        return table


class _Later:
    """An operation that the ranks carry out together when they wait for it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._result: Tensor | None = None

    @property
    def done(self) -> bool:
        return self._result is not None

    def wait(self, timeout_seconds: float | None = None) -> Tensor:
        """Run the collective: the communicator's time-out applies, not `timeout_seconds`."""
        if self._result is None:
            self._result = self._call()
        return self._result


def _nothing() -> None:
    return None
