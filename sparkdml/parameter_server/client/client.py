"""A worker's end: tables are cut into parts here, and put together again.

Called on the worker's threads. Calls return tickets; the sender's thread sends the requests and
receives the answers during computation. Updates may pass a filter: significant ones are sent, the
rest is held back for each table.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.parameter_server.client.base import Ask, Client, Rows, Ticket
from sparkdml.parameter_server.client.cutting import (
    Gathering,
    add_up_rows,
    check_shape,
    cut_rows,
    cut_whole,
)
from sparkdml.parameter_server.client.read_cache import ReadCache, Seen
from sparkdml.parameter_server.client.requests import Outstanding, PartsTicket, Request
from sparkdml.parameter_server.client.sender import Sender
from sparkdml.parameter_server.client.table_book import Known, Snapshot, TableBook
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import ASP
from sparkdml.parameter_server.filters import Filter, Residual, Significant
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.partition import Indexes, Key, Table, as_indexes
from sparkdml.parameter_server.stats import ClientStats
from sparkdml.parameter_server.wire.frames import HALF, Entry, Kind, Message, Status


def filter_of(config: ServerConfig) -> Callable[[int], Filter] | None:
    """The filter at each clock, or None where everything is sent."""
    consistency, chosen = config.consistency, config.filter
    if isinstance(consistency, ASP):
        return lambda clock: Significant(consistency.threshold(clock))
    return None if chosen is None else lambda clock: chosen


class UpdateFilter:
    def __init__(self, filter_at: Callable[[int], Filter]) -> None:
        self._filter_at = filter_at
        self._held: dict[int, Residual] = {}

    def sift(
        self,
        table: Table,
        value: Tensor,
        rows: Indexes | None,
        updater: Updater,
        weight: float,
        clock: int,
        seen: Seen | None,
    ) -> tuple[Indexes, Tensor]:
        """The rows to send now, ascending, with all that was held back of them."""
        if rows is None:
            check_shape(table, value)
            rows, matrix = np.arange(table.num_rows), table.matrix(value)
        else:
            rows, matrix = add_up_rows(table, value, rows)
        held = self._held.get(table.number)
        if held is None:
            held = self._held[table.number] = Residual(table.width, table.dtype)
        held.add(rows, matrix)
        # The update's approximate effect on the values: a gradient is divided for a small step.
        scale = 1.0 if updater.additive else getattr(updater, "lr", 1.0) / (weight or 1.0)
        values = None if seen is None else seen.values_of(held.rows)
        return held.take(self._filter_at(clock).choose(held.sums * scale, values))


class WorkerClient(Client):
    """The `Client` of a worker whose servers are found through `ask`; see `base.Client`."""

    def __init__(self, worker: int, config: ServerConfig, ask: Ask) -> None:
        self.worker = worker
        self.stats = ClientStats()
        self._config = config
        self._lock = threading.Lock()  # numbers must be given in the order of submission
        self._numbers: defaultdict[Key, int] = defaultdict(int)
        self._book = TableBook(config.part_bytes, self._submit, self.stats)
        self._reads = ReadCache(config.consistency)
        chosen = filter_of(config)
        self._update_filter = None if chosen is None else UpdateFilter(chosen)
        if chosen is not None and chosen(0).needs_values:
            self._reads.keep_values = True
        self._pushes = Outstanding()
        self._num_barriers = 0
        self._clock = 0
        self._clock_began, self._waited = time.monotonic(), 0.0
        self._closed = False
        self._sender = Sender(worker, config, ask, self.stats)
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> None:
        if not self._sender.greeted.wait(self._config.timeout_seconds):
            raise CommunicationError(
                f"worker {self.worker} found no servers within "
                f"{self._config.timeout_seconds:g} s (timeout_seconds). Check that all "
                f"{self._config.num_servers} servers have started, and that this host reaches them"
            )
        if self._sender.error is not None:
            raise self._sender.error
        self._clock = self._sender.start_clock or 0

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
        self._book.init(name, tensor, rows=rows, updater=updater, exact=exact)

    def set_optimizer(self, updater: Updater, names: Sequence[str] | None = None) -> None:
        self._book.set_updater(updater, names)

    def snapshot(self) -> Snapshot:
        self._pushes.wait()
        return self._book.snapshot(self._clock)

    def restore(self, snapshot: Snapshot) -> None:
        self._pushes.wait()
        self._book.restore(snapshot)
        with self._lock:
            self._reads.forget_all()

    # Push and pull ------------------------------------------------------------------------------

    def push(
        self,
        name: str,
        value: Tensor,
        rows: Rows | None = None,
        weight: float = 1.0,
        mark: int = 0,
    ) -> Ticket[None]:
        """See `Client.push`. With a `mark` a push counts once, even if the worker is restarted.

        A worker's marks to a table must increase; a push with an old mark does nothing in those
        parts of the table that have had it.
        """
        known = self._book.find(name)
        table = known.table
        if not 0 <= weight < float("inf"):
            raise ParameterError("weight", weight, "a finite number, at least 0")
        value = value.detach().to("cpu", table.dtype)
        indexes = None if rows is None else as_indexes(rows, table.num_rows)
        with self._lock:
            entries = self._entries(known, value, indexes, weight)
            self._reads.pushed(table, value, indexes, known.updater)
            ticket: PartsTicket[None] = PartsTicket(len(entries), lambda: None, self.stats)
            self._pushes.add(ticket)
            for entry in entries:
                self._numbers[entry.key] += 1
                entry.number = self._numbers[entry.key]
                entry.weight, entry.worker, entry.mark = weight, self.worker, mark
                self.stats.bytes_pushed += 0 if entry.values is None else entry.values.nbytes
            self._sender.submit([self._push_request(table, entry, ticket) for entry in entries])
        return ticket

    def _entries(
        self, known: Known, value: Tensor, indexes: Indexes | None, weight: float
    ) -> list[Entry]:
        """Return what of a push is sent to which parts now."""
        table, updater, exact = known.table, known.updater, known.exact
        # Parts without rows in this push must still receive its weight.
        all_parts = self._config.consistency.aggregates and not updater.additive
        if self._update_filter is not None and not exact:
            named, matrix = self._update_filter.sift(
                table,
                value,
                rows=indexes,
                updater=updater,
                weight=weight,
                clock=self._clock,
                seen=self._reads.last(table),
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
    ) -> PartsTicket[Tensor]:
        known = self._book.find(name)
        table = known.table
        indexes = None if rows is None else as_indexes(rows, table.num_rows)
        gathering = Gathering(table, indexes, out)
        with self._lock:
            if indexes is None and self._reads.reuse(table, self._clock, gathering.out):
                self.stats.cached_pulls += 1
                return PartsTicket(0, lambda: gathering.out)
            return self._read(known, gathering, indexes)

    def _read(
        self, known: Known, gathering: Gathering, indexes: Indexes | None
    ) -> PartsTicket[Tensor]:
        table, clock = known.table, self._clock
        stamps: list[int] = []  # of the parts, until the caller has waited for them

        def finish() -> Tensor:
            with self._lock:
                if stamps:
                    self._reads.read(
                        table, indexes, out=gathering.out, stamp=min(stamps), read=ticket
                    )
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
                flags=HALF if self._config.half and not known.exact else 0,
                answer_bytes=table.num_bytes(entry.part, entry.rows),
            )

        requests = [request_of(index, entry) for index, entry in enumerate(gathering.entries)]
        self._sender.submit(requests)
        return ticket

    def _push_request(self, table: Table, entry: Entry, ticket: PartsTicket[None]) -> Request:
        def done(message: Message, answer: Entry) -> None:
            if answer.status == Status.REFUSED:
                ticket.failed(CommunicationError("a server refused a push: has the table changed?"))
                return
            if answer.status == Status.NOT_FINITE:
                self.stats.dropped["not finite"] += 1
            elif answer.status == Status.REPEATED:
                self.stats.repeated += 1
                with self._lock:
                    self._reads.forget(table)  # it was added there, too
            else:
                self.stats.pushes += 1
            ticket.part_done()

        return Request(Kind.PUSH, entry, done, ticket.failed, clock=self._clock)

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            self._sender.submit(requests)

    def stamp(self, name: str) -> int | None:
        """The slowest worker's clock when a whole table was last read."""
        return self._reads.stamp(self._book.find(name).table)

    def read_again(self, name: str) -> bool:
        """Whether the last read of a whole table may be used while the next one is in flight.

        It lacks what this worker has pushed since.
        """
        stamp = self.stamp(name)
        if stamp is None or not self._config.consistency.may_go_on(stamp, self._clock):
            return False
        self.stats.cached_pulls += 1
        self.stats.staleness[max(0, self._clock - stamp)] += 1
        return True

    def flush(self) -> None:
        """Wait until the servers hold all that was pushed, without finishing the clock."""
        start = time.monotonic()
        self._pushes.wait()
        self.stats.wait_seconds += time.monotonic() - start
        self._check()

    # Clocks -------------------------------------------------------------------------------------

    def clock(self) -> int:
        self.flush()
        return self.clock_behind()

    def clock_behind(self) -> int:
        """Finish a clock once the servers hold all that was pushed, without waiting for that.

        Later reads are of the new clock; they see this worker's own pushes, as always.
        """
        self._check()
        self._sender.busy_seconds = self._computed_seconds()
        # A worker that was expelled for being slow continues at the others' clock.
        clock = self._clock = max(self._clock + 1, self._sender.moved_on)
        self._pushes.when_none(lambda: self._sender.report_clock(clock))
        return clock

    def _computed_seconds(self) -> float:
        """The seconds since the last clock, without the waits."""
        now, waited = time.monotonic(), self.stats.wait_seconds
        seconds = max(0.0, now - self._clock_began - (waited - self._waited))
        self._clock_began, self._waited = now, waited
        return seconds

    def _check(self) -> None:
        error = self._sender.error or self._pushes.error
        if error is not None:
            raise CommunicationError(str(error)) from error

    def barrier(self) -> None:
        self._pushes.wait()
        self._num_barriers += 1
        deadline = None
        while True:
            self._check()
            answer = self._sender.ask("server.barrier", name="", times=self._num_barriers)
            if answer is not None and answer["passed"]:
                return
            if answer is None:
                deadline = deadline or time.monotonic() + self._config.timeout_seconds
                if time.monotonic() > deadline:
                    raise CommunicationError("the driver can't be reached, for a barrier")
            time.sleep(0.01)

    # The end ------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._closed:
            self._pushes.wait()
            self._closed = True
            self._sender.close(leave=True)

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._sender.close(leave=False)
