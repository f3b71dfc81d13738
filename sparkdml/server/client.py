"""A worker's end: tables are cut into parts here, and put together again.

The calls return tickets; the courier's thread carries the requests behind the computation.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from torch import Tensor

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.server.base import Ask, Rows, Ticket
from sparkdml.server.config import ServerConfig
from sparkdml.server.courier import Courier, Request
from sparkdml.server.cutting import Gathering, add_up_rows, cut_rows, cut_whole, parts_of
from sparkdml.server.frames import Entry, Kind, Message, Status
from sparkdml.server.keys import Indexes, Key, Table, as_indexes
from sparkdml.server.node import CREATE, HALF, PROBE, RESTORE, SET_UPDATER, WHOLE
from sparkdml.server.optimizers import Add, Updater
from sparkdml.server.reading import ReadCache
from sparkdml.server.shard import Shard
from sparkdml.server.sifting import Sieve, filter_of
from sparkdml.server.snapshots import join_parts, split_state
from sparkdml.server.stats import ClientStats
from sparkdml.server.tickets import Outstanding, PartsTicket

BYTES_AT_ONCE = 32 << 20  # of tables that are made, saved or put back


class WorkerClient:
    """The `Client` of a worker whose servers are found through `ask`; see `base.Client`."""

    def __init__(self, worker: int, config: ServerConfig, ask: Ask) -> None:
        self.worker = worker
        self.stats = ClientStats()
        self._config = config
        self._lock = threading.Lock()  # numbers must be given in the order of submission
        self._numbers: defaultdict[Key, int] = defaultdict(int)
        self._tables: dict[str, Table] = {}
        self._updaters: dict[str, Updater] = {}
        self._exact: set[str] = set()
        self._reads = ReadCache(config.consistency)
        chosen = filter_of(config)
        self._sieve = None if chosen is None else Sieve(chosen)
        if chosen is not None and chosen(0).needs_values:
            self._reads.keep_values = True
        self._pushes = Outstanding()
        self._num_barriers = 0
        self._clock = 0
        self._clock_began, self._waited = time.monotonic(), 0.0
        self._closed = False
        self._courier = Courier(worker, config, ask, self.stats)
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> None:
        if not self._courier.greeted.wait(self._config.timeout_seconds):
            raise CommunicationError(
                f"worker {self.worker} found no servers within "
                f"{self._config.timeout_seconds:g} s (timeout_seconds). Have all "
                f"{self._config.num_servers} servers started, and can they be reached from here?"
            )
        if self._courier.error is not None:
            raise self._courier.error
        self._clock = self._courier.start_clock or 0

    @property
    def clock_now(self) -> int:
        return self._clock

    # Tables -------------------------------------------------------------------------------------

    def init(
        self,
        name: str,
        tensor: Tensor,
        rows: bool = False,
        updater: Updater | None = None,
        exact: bool = False,
    ) -> None:
        table = Table.of(name, tensor, rows, self._config.part_bytes)
        updater = updater or Add()
        text = {"table": table.to_dict(), "updater": updater.to_dict()}
        with self._lock:
            self._tables[name] = table
            self._updaters[name] = updater
            (self._exact.add if exact else self._exact.discard)(name)
        missing = self._missing_parts(table)
        if missing:
            self._change_all(
                (Entry(table.number, part, values=values), CREATE, text, ())
                for part, values in parts_of(table, tensor.detach().cpu(), missing)
            )

    def _missing_parts(self, table: Table) -> list[int]:
        """Those that the servers don't have: only these need be sent."""
        missing: list[int] = []
        ticket: PartsTicket[None] = PartsTicket(table.num_parts, _nothing, self.stats)

        def done(message: Message, answer: Entry) -> None:
            if answer.status == Status.UNKNOWN:
                missing.append(answer.part)
            ticket.part_done()

        self._submit(
            [
                Request(
                    Kind.INIT,
                    Entry(table.number, part),
                    done,
                    ticket.failed,
                    flags=PROBE,
                    may_be_unknown=True,
                )
                for part in range(table.num_parts)
            ]
        )
        ticket.wait()
        return sorted(missing)

    def _change_all(
        self, changes: Iterator[tuple[Entry, int, dict[str, Any], tuple[Entry, ...]]]
    ) -> None:
        """A message for each change, a few at a time: the whole need not be in memory twice."""
        at_once = max(1, BYTES_AT_ONCE // self._config.part_bytes)
        while batch := list(islice(changes, at_once)):
            ticket: PartsTicket[None] = PartsTicket(len(batch), _nothing, self.stats)
            self._submit(
                [
                    self._request(
                        Kind.INIT, entry, ticket, flags=flags, text=text, more=more, alone=True
                    )
                    for entry, flags, text, more in batch
                ]
            )
            ticket.wait()

    def set_optimizer(self, updater: Updater, names: Sequence[str] | None = None) -> None:
        tables = [self._table(name) for name in (self._tables if names is None else names)]
        text = {"updater": updater.to_dict()}
        for table in tables:
            self._updaters[table.name] = updater
        self._change_all(
            (Entry(table.number, part), SET_UPDATER, text, ())
            for table in tables
            for part in range(table.num_parts)
        )

    def _table(self, name: str) -> Table:
        table = self._tables.get(name)
        if table is None:
            known = ", ".join(map(repr, self._tables)) or "none yet"
            raise ParameterError("name", name, f"a table that init was called for ({known})")
        return table

    # Push and pull ------------------------------------------------------------------------------

    def push(
        self, name: str, value: Tensor, rows: Rows | None = None, weight: float = 1.0
    ) -> Ticket[None]:
        table = self._table(name)
        if not 0 <= weight < float("inf"):
            raise ParameterError("weight", weight, "a finite number, at least 0")
        value = value.detach().to("cpu", table.dtype)
        indexes = None if rows is None else as_indexes(rows, table.num_rows)
        with self._lock:
            entries = self._entries(table, value, indexes, weight)
            self._reads.pushed(table, value, indexes, self._updaters[name])
            ticket: PartsTicket[None] = PartsTicket(len(entries), _nothing, self.stats)
            self._pushes.add(ticket)
            for entry in entries:
                self._numbers[entry.key] += 1
                entry.number = self._numbers[entry.key]
                entry.weight, entry.worker = weight, self.worker
                self.stats.bytes_pushed += 0 if entry.values is None else entry.values.nbytes
            self._courier.submit(
                [self._request(Kind.PUSH, entry, ticket, clock=self._clock) for entry in entries]
            )
        return ticket

    def _entries(
        self, table: Table, value: Tensor, indexes: Indexes | None, weight: float
    ) -> list[Entry]:
        """What of a push goes to which parts, now."""
        updater = self._updaters[table.name]
        # Parts that a push has no rows for must still hear of its weight.
        all_parts = self._config.consistency.aggregates and not updater.additive
        exact = table.name in self._exact
        if self._sieve is not None and not exact:
            named, matrix = self._sieve.sift(
                table, value, indexes, updater, weight, self._clock, self._reads.last(table)
            )
            entries = cut_rows(table, named, matrix, all_parts)
        elif indexes is None:
            entries = cut_whole(table, value)
        else:
            entries = cut_rows(table, *add_up_rows(table, value, indexes), all_parts)
        if self._config.half and table.dtype.is_floating_point and not exact:
            for entry in entries:
                entry.values = None if entry.values is None else entry.values.half()
        return entries

    def pull(
        self, name: str, rows: Rows | None = None, out: Tensor | None = None
    ) -> Ticket[Tensor]:
        table = self._table(name)
        indexes = None if rows is None else as_indexes(rows, table.num_rows)
        gathering = Gathering(table, indexes, out)
        with self._lock:
            if indexes is None and self._reads.reuse(table, self._clock, gathering.out):
                self.stats.cached_pulls += 1
                return PartsTicket(0, lambda: gathering.out)
            return self._read(table, gathering, indexes)

    def _read(
        self, table: Table, gathering: Gathering, indexes: Indexes | None
    ) -> PartsTicket[Tensor]:
        clock = self._clock
        stamps: list[int] = []  # of the parts, until the caller has waited for them

        def finish() -> Tensor:
            with self._lock:
                if stamps:
                    self._reads.read(table, indexes, gathering.out, min(stamps), ticket)
                    stamps.clear()  # from now on the tensor is the caller's
            return gathering.out

        ticket = PartsTicket(len(gathering.entries), finish, self.stats)
        self._reads.begin(table, ticket)

        def request_of(index: int, entry: Entry) -> Request:
            def done(message: Message, answer: Entry) -> None:
                if answer.status != Status.OK or answer.values is None:
                    ticket.failed(CommunicationError("a server refused to read these rows"))
                    return
                self.stats.bytes_pulled += answer.values.nbytes
                self.stats.pulls += 1
                self.stats.staleness[max(0, clock - message.clock)] += 1
                stamps.append(message.clock)
                gathering.fill(index, answer.values)
                ticket.part_done()

            entry.number = self._numbers[entry.key]  # so that it sees this worker's own pushes
            return Request(
                Kind.PULL,
                entry,
                done,
                ticket.failed,
                clock=clock,
                flags=HALF if self._config.half and table.name not in self._exact else 0,
                answer_bytes=table.num_bytes(entry.part, entry.rows),
            )

        requests = [request_of(index, entry) for index, entry in enumerate(gathering.entries)]
        self._courier.submit(requests)
        return ticket

    def _request(
        self, kind: Kind, entry: Entry, ticket: PartsTicket[Any], **fields: Any
    ) -> Request:
        def done(message: Message, answer: Entry) -> None:
            if answer.status == Status.REFUSED:
                self.stats.dropped["refused"] += 1
            elif kind is Kind.PUSH:
                self.stats.pushes += 1
            ticket.part_done()

        return Request(kind, entry, done, ticket.failed, **fields)

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            self._courier.submit(requests)

    # Clocks -------------------------------------------------------------------------------------

    def clock(self) -> int:
        start = time.monotonic()
        self._pushes.wait()
        now = time.monotonic()
        self.stats.wait_seconds += now - start
        self._check()
        # One that was excused for being slow goes on where the others are.
        self._clock = max(self._clock + 1, self._courier.moved_on)
        waited = self.stats.wait_seconds
        self._courier.busy_seconds = max(0.0, now - self._clock_began - (waited - self._waited))
        self._clock_began, self._waited = now, waited
        self._courier.tell_clock(self._clock)
        return self._clock

    def _check(self) -> None:
        if self._courier.error is not None:
            raise CommunicationError(str(self._courier.error)) from self._courier.error

    def barrier(self) -> None:
        self._pushes.wait()
        self._num_barriers += 1
        deadline = None
        while True:
            self._check()
            answer = self._courier.ask("server.barrier", name="", times=self._num_barriers)
            if answer is not None and answer["passed"]:
                return
            if answer is None:
                deadline = deadline or time.monotonic() + self._config.timeout_seconds
                if time.monotonic() > deadline:
                    raise CommunicationError("the driver can't be reached, for a barrier")
            time.sleep(0.01)

    # State --------------------------------------------------------------------------------------

    def snapshot(self) -> Mapping[str, Mapping[str, Any]]:
        self._pushes.wait()
        found = {}
        at_once = max(1, BYTES_AT_ONCE // self._config.part_bytes)
        for name, table in list(self._tables.items()):
            shards: list[Shard] = []
            for start in range(0, table.num_parts, at_once):
                numbers = range(start, min(start + at_once, table.num_parts))
                shards += self._whole_parts([Entry(table.number, part) for part in numbers])
            found[name] = join_parts(table, shards)
        return found

    def _whole_parts(self, entries: list[Entry]) -> list[Shard]:
        shards: dict[int, Shard] = {}
        ticket: PartsTicket[None] = PartsTicket(len(entries), _nothing, self.stats)

        def done(message: Message, answer: Entry) -> None:
            shards[answer.part] = Shard.from_parts(message.text or {}, message.entries)
            ticket.part_done()

        self._submit(
            [
                Request(
                    Kind.PULL,
                    entry,
                    done,
                    ticket.failed,
                    clock=self._clock,
                    flags=WHOLE,
                    alone=True,
                )
                for entry in entries
            ]
        )
        ticket.wait()
        return [shards[entry.part] for entry in entries]

    def restore(self, snapshot: Mapping[str, Mapping[str, Any]]) -> None:
        self._pushes.wait()
        for name, state in snapshot.items():
            shards = split_state(name, state, self._config.part_bytes)
            with self._lock:
                self._tables[name] = shards[0].table
                self._updaters[name] = shards[0].updater
                self._reads.forget(name)
            parts = (shard.to_parts() for shard in shards)
            self._change_all(
                (entries[0], RESTORE, text, tuple(entries[1:])) for text, entries in parts
            )

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._closed:
            self._pushes.wait()
            self._closed = True
            self._courier.close(leave=True)

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._courier.close(leave=False)

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


def _nothing() -> None:
    return None
