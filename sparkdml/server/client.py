"""A worker's end: tables are cut into parts here, and put together again.

The calls return tickets; the courier's thread carries the requests behind the computation.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.server.base import Ask, Rows, Ticket
from sparkdml.server.config import ServerConfig
from sparkdml.server.courier import Courier, Request
from sparkdml.server.frames import Entry, Kind, Message, Status, rows_tensor
from sparkdml.server.keys import Indexes, Key, Table, as_indexes
from sparkdml.server.node import CREATE, HALF, RESTORE, SET_UPDATER, WHOLE
from sparkdml.server.optimizers import Add, Updater
from sparkdml.server.shard import Shard
from sparkdml.server.stats import ClientStats
from sparkdml.server.tickets import Outstanding, PartsTicket


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
        self._pushes = Outstanding()
        self._num_barriers = 0
        self._clock = 0
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
        self, name: str, tensor: Tensor, rows: bool = False, updater: Updater | None = None
    ) -> None:
        table = Table.of(name, tensor, rows, self._config.part_bytes)
        updater = updater or Add()
        values = table.matrix(tensor.detach().cpu().contiguous())
        text = {"table": table.to_dict(), "updater": updater.to_dict()}
        with self._lock:
            self._tables[name] = table
            self._updaters[name] = updater
        ticket: PartsTicket[None] = PartsTicket(table.num_parts, lambda: None, self.stats)
        self._submit(
            [
                self._request(
                    Kind.INIT,
                    Entry(table.number, part, values=_flat(values, *table.range(part))),
                    ticket,
                    flags=CREATE,
                    text=text,
                    alone=True,
                )
                for part in range(table.num_parts)
            ]
        )
        ticket.wait()

    def set_optimizer(self, updater: Updater, names: Sequence[str] | None = None) -> None:
        tables = [self._table(name) for name in (self._tables if names is None else names)]
        keys = [(table.number, part) for table in tables for part in range(table.num_parts)]
        ticket: PartsTicket[None] = PartsTicket(len(keys), lambda: None, self.stats)
        text = {"updater": updater.to_dict()}
        for table in tables:
            self._updaters[table.name] = updater
        self._submit(
            [
                self._request(
                    Kind.INIT, Entry(*key), ticket, flags=SET_UPDATER, text=text, alone=True
                )
                for key in keys
            ]
        )
        ticket.wait()

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
        entries = (
            _cut_whole(table, value)
            if rows is None
            else _cut_rows(table, value, as_indexes(rows, table.num_rows), self._needs_all(name))
        )
        if self._config.half and table.dtype.is_floating_point:
            for entry in entries:
                entry.values = None if entry.values is None else entry.values.half()
        ticket: PartsTicket[None] = PartsTicket(len(entries), lambda: None, self.stats)
        self._pushes.add(ticket)
        with self._lock:
            for entry in entries:
                self._numbers[entry.key] += 1
                entry.number = self._numbers[entry.key]
                entry.weight, entry.worker = weight, self.worker
                self.stats.bytes_pushed += 0 if entry.values is None else entry.values.nbytes
            self._courier.submit(
                [self._request(Kind.PUSH, entry, ticket, clock=self._clock) for entry in entries]
            )
        return ticket

    def _needs_all(self, name: str) -> bool:
        """Whether parts that a push has no rows for must still hear of its weight."""
        return self._config.consistency.aggregates and not self._updaters[name].additive

    def pull(
        self, name: str, rows: Rows | None = None, out: Tensor | None = None
    ) -> Ticket[Tensor]:
        table = self._table(name)
        if rows is None:
            shape = table.shape
            entries = [Entry(table.number, part) for part in range(table.num_parts)]
            places: list[Any] = [slice(*table.range(part)) for part in range(table.num_parts)]
        else:
            if not table.by_row:
                raise ParameterError("rows", "given", "None, as the table was made without rows")
            wanted = as_indexes(rows, table.num_rows)
            shape = (len(wanted), *table.shape[1:])
            named, inverse = np.unique(wanted, return_inverse=True)
            entries, places = [], []
            order = np.argsort(inverse, kind="stable")
            counts = np.cumsum(np.bincount(inverse, minlength=len(named)))
            for part, stretch in table.split_rows(named):
                start = table.range(part)[0]
                entries.append(Entry(table.number, part, rows=rows_tensor(named[stretch] - start)))
                first = counts[stretch.start - 1] if stretch.start else 0
                where = order[first : counts[stretch.stop - 1]]
                places.append((where, inverse[where] - stretch.start))
        if out is None:
            out = torch.empty(shape, dtype=table.dtype)
        elif out.shape != shape or out.dtype != table.dtype or not out.is_contiguous():
            raise ParameterError(
                "out", f"{tuple(out.shape)} of {out.dtype}", f"contiguous, {shape} of {table.dtype}"
            )
        result = out
        matrix = result.detach().view(-1, table.width)
        ticket: PartsTicket[Tensor] = PartsTicket(len(entries), lambda: result, self.stats)
        flags = HALF if self._config.half else 0
        requests = []
        with self._lock:
            for entry, place in zip(entries, places, strict=True):
                entry.number = self._numbers[entry.key]  # so that it sees this worker's own pushes
                request = self._request(Kind.PULL, entry, ticket, clock=self._clock, flags=flags)
                request.done = _fill(matrix, place, ticket, self.stats, self._clock)
                requests.append(request)
            self._courier.submit(requests)
        return ticket

    def _request(
        self, kind: Kind, entry: Entry, ticket: PartsTicket[Any], **fields: Any
    ) -> Request:
        def done(message: Message, answer: Entry) -> None:
            if kind is Kind.PUSH:
                self.stats.pushes += answer.status == Status.OK
                self.stats.dropped["refused"] += answer.status == Status.REFUSED
            ticket.part_done()

        return Request(kind, entry, done, ticket.failed, **fields)

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            self._courier.submit(requests)

    # Clocks -------------------------------------------------------------------------------------

    def clock(self) -> int:
        start = time.monotonic()
        self._pushes.wait()
        self.stats.wait_seconds += time.monotonic() - start
        if self._courier.error is not None:
            raise CommunicationError(str(self._courier.error)) from self._courier.error
        self._clock += 1
        self._courier.tell_clock(self._clock)
        return self._clock

    def barrier(self) -> None:
        self._pushes.wait()
        self._num_barriers += 1
        deadline = None
        while True:
            if self._courier.error is not None:
                raise CommunicationError(str(self._courier.error)) from self._courier.error
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
        found: dict[str, dict[str, Any]] = {}
        tickets = []
        for name, table in self._tables.items():
            parts: list[Shard | None] = [None] * table.num_parts
            ticket: PartsTicket[None] = PartsTicket(table.num_parts, lambda: None, self.stats)
            requests = []
            for part in range(table.num_parts):
                request = self._request(
                    Kind.PULL,
                    Entry(table.number, part),
                    ticket,
                    clock=self._clock,
                    flags=WHOLE,
                    alone=True,
                )
                request.done = _keep(parts, part, ticket)
                requests.append(request)
            self._submit(requests)
            tickets.append((name, table, parts, ticket))
        for name, table, parts, ticket in tickets:
            ticket.wait()
            found[name] = _join(table, [part for part in parts if part is not None])
        return found

    def restore(self, snapshot: Mapping[str, Mapping[str, Any]]) -> None:
        self._pushes.wait()
        tickets = []
        for name, state in snapshot.items():
            shards = _split(name, state, self._config.part_bytes)
            table = shards[0].table
            with self._lock:
                self._tables[name] = table
                self._updaters[name] = shards[0].updater
            ticket: PartsTicket[None] = PartsTicket(len(shards), lambda: None, self.stats)
            requests = []
            for shard in shards:
                text, entries = shard.to_parts()
                request = self._request(
                    Kind.INIT, entries[0], ticket, flags=RESTORE, text=text, alone=True
                )
                request.more = tuple(entries[1:])
                requests.append(request)
            self._submit(requests)
            tickets.append(ticket)
        for ticket in tickets:
            ticket.wait()

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


def _flat(matrix: Tensor, start: int, stop: int) -> Tensor:
    return matrix[start:stop].reshape(-1)


def _cut_whole(table: Table, value: Tensor) -> list[Entry]:
    if value.shape != table.shape:
        raise ParameterError(
            "value", f"of shape {tuple(value.shape)}", f"of the table's shape {table.shape}"
        )
    matrix = table.matrix(value.contiguous())
    return [
        Entry(table.number, part, values=_flat(matrix, *table.range(part)))
        for part in range(table.num_parts)
    ]


def _cut_rows(table: Table, value: Tensor, rows: Indexes, all_parts: bool) -> list[Entry]:
    """Entries for the parts that have some of the rows; each row once, in ascending order."""
    if not table.by_row:
        raise ParameterError("rows", "given", "None, as the table was made without rows")
    if value.shape != (len(rows), *table.shape[1:]):
        raise ParameterError(
            "value",
            f"of shape {tuple(value.shape)}",
            f"of shape {(len(rows), *table.shape[1:])}, one for each row",
        )
    named, inverse = np.unique(rows, return_inverse=True)
    matrix = value.reshape(len(rows), table.width)
    total = torch.zeros((len(named), table.width), dtype=table.dtype)
    total.index_add_(0, torch.from_numpy(inverse), matrix)
    entries = {}
    for part, stretch in table.split_rows(named):
        start = table.range(part)[0]
        entries[part] = Entry(
            table.number,
            part,
            rows=rows_tensor(named[stretch] - start),
            values=total[stretch].reshape(-1),
        )
    if all_parts:
        nothing = torch.empty(0, dtype=torch.int32)
        for part in range(table.num_parts):
            entries.setdefault(part, Entry(table.number, part, rows=nothing))
    return list(entries.values())


def _fill(
    matrix: Tensor, place: Any, ticket: PartsTicket[Tensor], stats: ClientStats, clock: int
) -> Any:
    """What to do with one part of a pull."""

    def done(message: Message, answer: Entry) -> None:
        if answer.status != Status.OK or answer.values is None:
            ticket.failed(CommunicationError("a server refused to read these rows"))
            return
        values = answer.values.view(-1, matrix.shape[1])
        stats.bytes_pulled += answer.values.nbytes
        stats.pulls += 1
        stats.staleness[max(0, clock - message.clock)] += 1
        if isinstance(place, slice):
            matrix[place] = values.to(matrix.dtype)
        else:
            where, chosen = place
            matrix[torch.from_numpy(where)] = values.to(matrix.dtype)[torch.from_numpy(chosen)]
        ticket.part_done()

    return done


def _keep(parts: list[Shard | None], part: int, ticket: PartsTicket[None]) -> Any:
    def done(message: Message, answer: Entry) -> None:
        parts[part] = Shard.from_parts(message.text or {}, message.entries)
        ticket.part_done()

    return done


def _join(table: Table, parts: list[Shard]) -> dict[str, Any]:
    """The parts of a table as one state, whatever their sizes were."""
    assert len(parts) == table.num_parts
    slots = {}
    for name, slot in parts[0].slots.items():
        whole = (len(slot) == len(parts[0].values) and len(slot) > 1) or table.num_rows == 1
        slots[name] = torch.cat([part.slots[name] for part in parts]) if whole else slot
    return {
        "values": torch.cat([part.values for part in parts]).reshape(table.shape),
        "rows": table.by_row,
        "updater": parts[0].updater.to_dict(),
        "slots": slots,
    }


def _split(name: str, state: Mapping[str, Any], part_bytes: int) -> list[Shard]:
    from sparkdml.server.optimizers import updater_from

    values = state["values"]
    table = Table.of(name, values, state["rows"], part_bytes)
    matrix = table.matrix(values.contiguous())
    shards = []
    for part in range(table.num_parts):
        start, stop = table.range(part)
        shard = Shard.new(table, part, updater_from(state["updater"]), matrix[start:stop])
        for slot_name, slot in state["slots"].items():
            whole = len(slot) == table.num_rows
            shard.slots[slot_name] = slot[start:stop].clone() if whole else slot.clone()
        shards.append(shard)
    return shards
