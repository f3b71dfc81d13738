"""A client's requests, and its connections with what is under way on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkdml.server.frames import Entry, Kind, Message
from sparkdml.server.keys import Key
from sparkdml.server.wire import Outbox

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
    answer_bytes: int = 0  # how much will come back

    @property
    def size(self) -> int:
        """Of the tensors, there or back: many small messages overlap better than a large one."""
        values = self.entry.values
        return self.answer_bytes + (0 if values is None else values.nbytes)


class Line:
    """A connection, and what is under way on it."""

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
