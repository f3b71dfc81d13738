"""The driver-side service of leases: which worker may train on which rows of an epoch.

Runs in the driver's process, on the control server's threads, and outlives the workers. A strategy
whose workers read by leases returns one from `driver_service()`, or passes on what is asked about
`lease.…` from a service of its own. A question costs a round trip to the driver, of 0.2 to 0.4 ms
on one host: one for a lease, and one when rows of it have been used.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import astuple
from typing import Any, Protocol

from sparkdml.errors import DataError, ProtocolError
from sparkdml.feed.leases import LeaseTable

NUM_EPOCHS_KEPT = 2

Message = dict[str, Any]


class Worker(Protocol):
    """What is known here of the worker that asks."""

    @property
    def rank(self) -> int: ...


class LeaseService:
    """Answers the questions of `leased.LeaseReader`.

    Args:
        num_workers: all of them own rows.
        max_batches: the longest lease, in batches.
        lease_seconds: how long a worker may go without using a row of its lease. None: forever,
            as in a gang, of which no member can be lost alone; then no worker waits for leases that
            may come back.
        backs_up: whether idle workers are given of what slow ones have not used yet.
    """

    def __init__(
        self,
        num_workers: int,
        max_batches: int = 4,
        lease_seconds: float | None = None,
        backs_up: bool = False,
    ) -> None:
        self._num_workers, self._max_batches, self._backs_up = num_workers, max_batches, backs_up
        self._lease_seconds = math.inf if lease_seconds is None else lease_seconds
        self._tables: dict[int, LeaseTable] = {}
        self._cards: dict[tuple[int, int], Message] = {}  # by epoch and owner
        self._lock = threading.Lock()

    def answer(self, peer: Worker, about: str, fields: Message) -> Any:
        with self._lock:
            epoch = int(fields["epoch"])
            if self._tables and epoch <= max(self._tables) - NUM_EPOCHS_KEPT:
                # Over long ago: a worker that Spark has started again catches up with the others.
                return {"over": True, "valid": False, "rows": 0, "use": None}
            if about == "lease.begin":
                return self._begin(peer.rank, epoch, fields)
            if about == "lease.card":
                return self._cards.get((epoch, int(fields["owner"])))
            table = self._table(epoch)
            if about == "lease.next":
                return self._next(table, peer.rank, fields)
            if about == "lease.use":
                number, rows = int(fields["number"]), int(fields["rows"])
                mark = int(fields["mark"])
                return {"valid": table.use(number, rows, time.monotonic(), mark)}
            if about == "lease.last":
                use = table.last_use(peer.rank)
                return {"use": None if use is None else [*astuple(use)]}
            if about == "lease.back":
                table.give_back(int(fields["number"]))
                return {}
            if about == "lease.used":
                return {"rows": table.used(peer.rank)}
        raise ProtocolError(f"the lease service knows no question about {about!r}")

    def on_join(self, peer: Worker) -> None:
        """It will say what it has when it begins."""

    def on_leave(self, peer: Worker, outcome: str) -> None:
        if outcome == "done":
            return  # its leases are used, and others may have mapped its rows
        with self._lock:
            for table in self._tables.values():
                table.died(peer.rank)

    def _table(self, epoch: int) -> LeaseTable:
        if epoch not in self._tables:
            self._tables[epoch] = LeaseTable(
                self._num_workers, self._max_batches, self._lease_seconds, self._backs_up
            )
            for old in [one for one in self._tables if one <= epoch - NUM_EPOCHS_KEPT]:
                del self._tables[old]
                self._cards = {key: card for key, card in self._cards.items() if key[0] != old}
        return self._tables[epoch]

    def _begin(self, owner: int, epoch: int, fields: Message) -> Message:
        if not self._table(epoch).begin(owner, int(fields["rows"])):
            raise DataError(
                f"worker {owner} has {fields['rows']:,} rows after a restart, and had others before"
            )
        self._cards[epoch, owner] = fields["card"]
        return {}

    def _next(self, table: LeaseTable, worker: int, fields: Message) -> Message:
        until = math.inf if fields["until"] is None else float(fields["until"])
        lease = table.grant(worker, int(fields["batch"]), time.monotonic(), until)
        if lease is not None:
            return {"lease": [lease.number, lease.owner, lease.start, lease.stop]}
        if table.is_over or table.num_granted >= until:
            return {"over": True}
        never_back = math.isinf(self._lease_seconds)
        return {"over": True} if never_back and table.is_granted else {"wait": True}
