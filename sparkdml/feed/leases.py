"""Leases: which worker may train on which rows of an epoch, decided in the driver.

An owner's rows of an epoch have an order; a piece is a stretch of it. A quick worker asks sooner
and so gets more; its own rows come first, since they are on its own disk. Rows of a lease that were
not used when it expired, or when its holder died, are leased to another worker, and the old holder
is refused when it wants to use them: each row is used exactly once, whatever happens in whatever
order. With backups, no worker waits for a slow holder either: a worker that finds nothing free is
leased what others hold and have not used, and the first to finish counts.

The table of leases is pure: time comes from the caller. The service that owns it runs in the
driver's process, on the control server's threads, and outlives the workers. A strategy whose
workers read by leases returns one from `driver_service()`, or passes on what is asked about
`lease.…` from a service of its own. A question costs a round trip to the driver, of 0.2 to 0.4 ms
on one host: one for a lease, and one when rows of it have been used.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import insort
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from sparkdml.errors import DataError, ProtocolError

Stretch = tuple[int, int]  # from, to


@dataclass
class Lease:
    """A stretch of an owner's rows that one worker may use, from the front, until the deadline."""

    number: int
    holder: int
    owner: int
    start: int  # moves on as rows are used
    stop: int
    deadline: float = math.inf
    rival: int | None = None  # the number of another lease of the same rows: a backup, or its cause


@dataclass(frozen=True)
class Use:
    """Rows that a worker has counted as used, under a mark of its own."""

    mark: int
    owner: int
    start: int
    stop: int


@dataclass
class LeaseTable:
    """One epoch. Owners `begin` when they know their rows; others' pieces are granted meanwhile.

    Args:
        num_owners: how many owners there will be.
        max_batches: the longest lease, in batches. Towards the end of an epoch they are shorter.
        lease_seconds: how long a worker may go without using a row of its lease.
        backs_up: whether a worker for whom nothing is free is leased rows of other leases.
    """

    num_owners: int
    max_batches: int = 4
    lease_seconds: float = math.inf
    backs_up: bool = False
    num_granted: int = 0  # rows, without those that were returned
    _rows: dict[int, int] = field(default_factory=dict)
    _used: dict[int, int] = field(default_factory=dict)
    _free: dict[int, list[Stretch]] = field(default_factory=dict)
    _leases: dict[int, Lease] = field(default_factory=dict)
    _away: set[int] = field(default_factory=set)
    _last_uses: dict[int, Use] = field(default_factory=dict)
    _last_number: int = 0

    def begin(self, owner: int, num_rows: int) -> bool:
        """The owner's rows are there to be read; once more, if it had left and is back.

        False if it is back with another number of rows.
        """
        self._away.discard(owner)
        if owner not in self._rows:
            self._rows[owner], self._used[owner] = num_rows, 0
            self._free[owner] = [(0, num_rows)] if num_rows else []
        return self._rows[owner] == num_rows

    def grant(
        self, worker: int, batch_rows: int, now: float = 0.0, until: float = math.inf
    ) -> Lease | None:
        """The next piece for a worker; None if there is none, or `until` rows have been granted."""
        self.expire(now)
        free = {
            owner: sum(stop - start for start, stop in stretches)
            for owner, stretches in self._free.items()
            if stretches and owner not in self._away
        }
        left = min(sum(free.values()), until - self.num_granted)
        if left <= 0:
            return None if free or not self.backs_up else self._back_up(worker, batch_rows, now)
        owner = worker if worker in free else max(free, key=lambda o: (free[o], -o))
        # Guided self-scheduling: half of an even share of what is left, so that all end together.
        batches = int(left / batch_rows) // (2 * max(1, self.num_owners))
        length = batch_rows * max(1, min(batches, self.max_batches))
        start, stop = self._free[owner].pop(0)
        if stop - start > length:
            insort(self._free[owner], (start + length, stop))
            stop = start + length
        self.num_granted += stop - start
        return self._lease(worker, owner, start=start, stop=stop, now=now)

    def _lease(self, worker: int, owner: int, start: int, stop: int, now: float) -> Lease:
        self._last_number += 1
        lease = Lease(
            self._last_number,
            worker,
            owner=owner,
            start=start,
            stop=stop,
            deadline=now + self.lease_seconds,
        )
        self._leases[lease.number] = lease
        return lease

    def _back_up(self, worker: int, batch_rows: int, now: float) -> Lease | None:
        """Of the longest lease that another has: all but its first batch, or that batch as well."""
        others = [one for one in self._leases.values() if one.holder != worker and not one.rival]
        if not others or not self.has_begun:
            return None
        lease = max(others, key=lambda one: (one.stop - one.start, -one.number))
        if lease.stop - lease.start > batch_rows:
            stop, lease.stop = lease.stop, lease.start + batch_rows
            return self._lease(worker, lease.owner, start=lease.stop, stop=stop, now=now)
        backup = self._lease(worker, lease.owner, start=lease.start, stop=lease.stop, now=now)
        backup.rival, lease.rival = lease.number, backup.number
        return backup

    def use(self, number: int, num_rows: int, now: float = 0.0, mark: int = 0) -> bool:
        """Whether the holder may count the next rows of its lease as trained on: if it is valid.

        The last ones with a mark are remembered, should the holder die before it is done with them.
        """
        self.expire(now)
        lease = self._leases.get(number)
        if lease is None:
            return False
        assert 0 <= num_rows <= lease.stop - lease.start, "more than was leased"
        assert lease.rival is None or num_rows == lease.stop - lease.start, "a batch, and no less"
        if lease.rival is not None:
            del self._leases[lease.rival]
        if mark:
            use = Use(mark, lease.owner, lease.start, lease.start + num_rows)
            self._last_uses[lease.holder] = use
        lease.start += num_rows
        lease.deadline = now + self.lease_seconds
        self._used[lease.owner] += num_rows
        if lease.start == lease.stop:
            del self._leases[number]
        return True

    def expire(self, now: float) -> None:
        """What has not been used in time is free again."""
        for lease in [one for one in self._leases.values() if one.deadline < now]:
            self._give_back(lease)

    def died(self, worker: int) -> None:
        """A worker's leases are free again; its own rows, once it is back."""
        if worker in self._rows:
            self._away.add(worker)
        for lease in [one for one in self._leases.values() if one.holder == worker]:
            self._give_back(lease)

    def give_back(self, number: int) -> None:
        """The holder can't use what is left of its lease."""
        if number in self._leases:
            self._give_back(self._leases[number])

    def _give_back(self, lease: Lease) -> None:
        del self._leases[lease.number]
        if lease.rival is not None:
            self._leases[lease.rival].rival = None  # which is the only holder now
            return
        self.num_granted -= lease.stop - lease.start
        insort(self._free[lease.owner], (lease.start, lease.stop))

    def last_use(self, worker: int) -> Use | None:
        return self._last_uses.get(worker)

    @property
    def has_begun(self) -> bool:
        """Whether all rows are known."""
        return len(self._rows) == self.num_owners

    @property
    def is_granted(self) -> bool:
        """Whether nothing is free, nor will be unless leases are returned."""
        return self.has_begun and not any(self._free.values())

    @property
    def is_over(self) -> bool:
        """Whether every row has been used."""
        return self.has_begun and self._used == self._rows

    def used(self, owner: int) -> int:
        """How many of an owner's rows have been used: the first ones, while no lease is out."""
        return self._used.get(owner, 0)


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
            may be returned.
        backs_up: whether idle workers are leased rows that slow ones have not used yet.
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
