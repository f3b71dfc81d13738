"""A client's requests, its connections with the requests in flight, and the callers' tickets.

The caller's thread waits for a ticket; the sender's thread completes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sparkdml.errors import CommunicationError
from sparkdml.parameter_server.partition import Key
from sparkdml.parameter_server.stats import ClientStats
from sparkdml.parameter_server.wire.frames import Entry, Kind, Message
from sparkdml.parameter_server.wire.sockets import Outbox

Result = TypeVar("Result")


class PartsTicket(Generic[Result]):
    """Done when all its parts are. `finish` makes the result, on the waiting thread."""

    def __init__(
        self, num_parts: int, finish: Callable[[], Result], stats: ClientStats | None = None
    ) -> None:
        self._open = num_parts
        self._finish = finish
        self._stats = stats
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        if not num_parts:
            self._event.set()

    def part_done(self) -> None:
        with self._lock:
            self._open -= 1
            over = self._open == 0
        if over:
            self._end()

    def failed(self, error: Exception) -> None:
        self._error = self._error or error
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()

    def when_done(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(call)
                return
        call()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    @property
    def error(self) -> Exception | None:
        return self._error

    def wait_a_little(self, seconds: float) -> bool:
        """Whether it is done by the deadline."""
        start = time.monotonic()
        done = self._event.wait(seconds)
        if self._stats is not None:
            self._stats.wait_seconds += time.monotonic() - start
        return done

    def wait(self, timeout_seconds: float | None = None) -> Result:
        start = time.monotonic()
        if not self._event.wait(timeout_seconds):
            raise CommunicationError(f"not done within {timeout_seconds:g} s (timeout_seconds)")
        if self._stats is not None:
            self._stats.wait_seconds += time.monotonic() - start
        if self._error is not None:
            # A new one each time: an exception that is raised twice gathers tracebacks.
            raise CommunicationError(str(self._error)) from self._error
        return self._finish()


class Outstanding:
    """Counts tickets that are not done yet, and lets a thread wait for none."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []
        self.error: Exception | None = None  # of the first one that failed

    def add(self, ticket: PartsTicket[None]) -> None:
        with self._changed:
            self._count += 1
        ticket.when_done(lambda: self._remove(ticket.error))

    def when_none(self, call: Callable[[], None]) -> None:
        """Call a function, on any thread, once all tickets are done; never if one has failed."""
        with self._changed:
            if self._count:
                self._callbacks.append(call)
                return
        if self.error is None:
            call()

    def _remove(self, error: Exception | None) -> None:
        with self._changed:
            self._count -= 1
            self.error = self.error or error
            callbacks: list[Callable[[], None]] = []
            if not self._count:
                callbacks, self._callbacks = self._callbacks, callbacks
            self._changed.notify_all()
        for call in callbacks if self.error is None else ():
            call()

    def wait(self) -> None:
        """Wait for the answer; the sender ends every ticket, with a result or an error."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0)


MESSAGE_BYTES = 2 << 20
MESSAGE_ENTRIES = 512


@dataclass(eq=False)
class Request:
    """One part's share of a push, a pull or an init."""

    kind: Kind
    entry: Entry
    done: Callable[[Message, Entry], None]
    failed: Callable[[Exception], None]
    clock: int = 0
    flags: int = 0
    text: dict[str, Any] | None = None
    more: tuple[Entry, ...] = ()  # further entries that belong to it
    alone: bool = False  # has a message of its own
    may_be_unknown: bool = False  # then that is an answer, too
    under_way: bool = False
    finished: bool = False
    trouble_since: float | None = None
    signature: int = 0  # of its rows, where these are many
    answer_bytes: int = 0  # the size of the answer

    @property
    def size(self) -> int:
        """The tensors' size, sent or received: small messages overlap better than a large one."""
        values = self.entry.values
        return self.answer_bytes + (0 if values is None else values.nbytes)


class ServerConnection:
    """A connection, and the requests in flight on it."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.under_way: dict[int, list[Request]] = {}
        self.last_heard = time.monotonic()
        self.last_hello = 0.0
        self.hello_number = 0
        self.greeted = False
        self.clock_told = -1
        self.num_lost = 0  # messages known to be lost, either way
        self.known_rows: dict[Key, int] = {}  # the lists that the server has, by signature
        self.batch: list[Request] = []
        self.batch_bytes = 0

    def fits(self, request: Request) -> bool:
        """Whether it can go with those that are about to be sent."""
        if not self.batch:
            return True
        first = self.batch[0]
        return (
            not (first.alone or request.alone)
            and (first.kind, first.flags, first.clock)
            == (request.kind, request.flags, request.clock)
            and self.batch_bytes + request.size <= MESSAGE_BYTES
            and len(self.batch) < MESSAGE_ENTRIES
        )
