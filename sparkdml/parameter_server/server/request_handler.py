"""Handles the workers' requests at a server: push, pull, create tables. Runs on the node's thread.

A push is acknowledged once every replica has it; a read is answered once the clock allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import Clocks
from sparkdml.parameter_server.optimizers import updater_from
from sparkdml.parameter_server.partition import Key, Table
from sparkdml.parameter_server.server.clock_copies import ClockCopies
from sparkdml.parameter_server.server.replicator import Replicator
from sparkdml.parameter_server.stats import NodeStats
from sparkdml.parameter_server.stored_partition import Partition
from sparkdml.parameter_server.wire.frames import (
    AT_CLOCK,
    CREATE,
    FETCH,
    HALF,
    PROBE,
    PUSH,
    ROWS_NAMED,
    SET_UPDATER,
    SKIP,
    WHOLE,
    Entry,
    Message,
    RowCache,
    Status,
)

Text = dict[str, Any] | None
Send = Callable[[Message, list[Entry], Text], None]  # the question, and the answer to it


class _Answer:
    """Collects the results of a message's entries, and is sent when the last one is decided."""

    def __init__(self, message: Message, send: Send) -> None:
        self.message = message
        self.entries = [
            Entry(entry.table, entry.part, number=entry.number) for entry in message.entries
        ]
        self._open = len(self.entries)
        self._send = send

    def decide(self, index: int, status: Status) -> None:
        self.entries[index].status = status
        self._open -= 1
        if not self._open:
            self._send(self.message, self.entries, None)

    def decide_all(self, status: Status) -> None:
        for index in range(len(self.entries)):
            self.decide(index, status)


class RequestHandler:
    """Belongs to a node, and runs on its thread."""

    def __init__(
        self,
        config: ServerConfig,
        partitions: dict[Key, Partition],
        clocks: Clocks,
        replicator: Replicator,
        stats: NodeStats,
        send: Send,
    ) -> None:
        self._config, self._partitions, self._clocks = config, partitions, clocks
        self._replicator, self._stats, self._send = replicator, stats, send
        self._keep = config.consistency.aggregates
        self._stand_in = config.consistency.stands_in
        self._rows = RowCache()
        self._reads: list[Message] = []  # those that wait for the clock
        self.copies = ClockCopies(clocks, self._keep)
        self.sessions: frozenset[int] = frozenset()  # the numbers of the workers' clients

    def pull(self, message: Message) -> None:
        """Answer a read, now or when the clock allows it."""
        if message.flags & AT_CLOCK:
            self._show(message)
        elif not self._pull(message):
            self._reads.append(message)
            self._stats.queue = len(self._reads)
            self._stats.longest_queue = max(self._stats.longest_queue, self._stats.queue)

    def waiting_reads(self) -> list[Message]:
        """Take the reads that waited for the clock, to try them again."""
        waiting, self._reads = self._reads, []
        self._stats.queue = 0
        return waiting

    def find_rows(self, message: Message) -> None:
        """Put back the rows that were named by a signature, and remember those that were sent."""
        for entry in message.entries:
            entry.status = Status.OK
            if entry.flags & ROWS_NAMED:
                entry.rows = self._rows.find(message.sender, entry.key, entry.session)
                if entry.rows is None:
                    entry.status = Status.ROWS_UNKNOWN
                else:
                    self._stats.rows_named += 1
            elif entry.rows is not None and entry.session:
                self._rows.keep(message.sender, entry.key, entry.session, entry.rows)

    def _find(self, entry: Entry) -> Partition | Status:
        if not self._replicator.is_primary(entry.key):
            return Status.MOVED
        if entry.status:
            return Status(entry.status)
        return self._partitions.get(entry.key) or Status.UNKNOWN

    def push(self, message: Message) -> None:
        self._stats.bytes_pushed += message.num_bytes
        answer = _Answer(message, self._send)
        for index, entry in enumerate(message.entries):
            entry.session, entry.clock = message.sender, message.clock
            partition = self._find(entry)
            if not isinstance(partition, Partition):
                answer.decide(index, partition)
                continue
            status = partition.check(entry, self._config.finite_only)
            is_known = entry.number <= partition.applied.get(entry.session, 0)
            if status is Status.OK and not is_known and partition.has_had(entry):
                status = Status.REPEATED
            safe = self._when_safe(answer, index, status)
            if status is Status.GAP:
                answer.decide(index, status)
            elif is_known:
                self._stats.repeated += 1
                # The first time it may not be safe yet.
                self._replicator.wait(entry.key, partition.version, safe)
            else:
                before = partition.generation
                entry.flags = PUSH if status is Status.OK else SKIP
                if status is Status.OK:
                    push = partition.push_from(entry)
                    partition.take(push, self._keep, self._stand_in)
                    self.copies.pushed(entry.key, push)
                else:
                    if status is Status.REPEATED:
                        self._stats.repeated += 1
                    else:
                        self._stats.dropped[status.name.lower().replace("_", " ")] += 1
                    partition.skip(entry.session, entry.number)
                    entry.rows = entry.values = None
                self._replicator.changed(partition, entry, before, safe)

    def _when_safe(
        self, answer: _Answer, index: int, pushed: Status | None
    ) -> Callable[[bool], None]:
        """Decide an entry once its change is at all replicas; `pushed`: what became of a push."""

        def decide(is_safe: bool) -> None:
            self._stats.pushes += is_safe and pushed is Status.OK
            answer.decide(index, (pushed or Status.OK) if is_safe else Status.MOVED)

        return decide

    def _pull(self, message: Message) -> bool:
        """Answer a read, if the clock allows it; whether it did."""
        clock, slowest = message.clock, self._clocks.slowest
        if not self._config.consistency.may_read(clock, slowest):
            return False
        found = [self._find(entry) for entry in message.entries]
        if self._keep and any(isinstance(s, Partition) and s.stepped < clock for s in found):
            return False
        answer = _Answer(message, self._send)
        if message.flags & WHOLE:
            self._send_whole(message, found[0])
            return True
        for index, (entry, partition) in enumerate(zip(message.entries, found, strict=True)):
            if not isinstance(partition, Partition):
                answer.decide(index, partition)
            elif entry.number > partition.applied.get(message.sender, 0):
                answer.decide(index, Status.GAP)
            elif (
                entry.rows is not None
                and len(entry.rows)
                and not (
                    int(entry.rows.min()) >= 0 and int(entry.rows.max()) < len(partition.values)
                )
            ):
                answer.decide(index, Status.REFUSED)
            else:
                values = (
                    partition.values.clone()  # it may change before it is sent
                    if entry.rows is None
                    else partition.values[entry.rows.to(torch.int64)]
                )
                if message.flags & HALF and values.dtype.is_floating_point:
                    values = values.half()
                answer.entries[index].values = values.reshape(-1)
                self._stats.pulls += 1
                self._stats.bytes_pulled += values.nbytes
                answer.decide(index, Status.OK)
        return True

    def _show(self, message: Message) -> None:
        """Send a snapshot reader the parts after a clock; it asks again for those not ready."""
        entries = []
        for asked in message.entries:
            partition = self._find(asked)
            answer = Entry(asked.table, asked.part)
            if isinstance(partition, Partition):
                wants_values = bool(message.flags & FETCH)
                self.copies.answer(
                    answer,
                    message.sender,
                    partition=partition,
                    clock=message.clock,
                    sessions=self.sessions,
                    wants_values=wants_values,
                )
            else:
                answer.status = partition
            entries.append(answer)
        self._send(message, entries, None)

    def _send_whole(self, message: Message, partition: Partition | Status) -> None:
        """Send a part with its updater's state, for a checkpoint."""
        if isinstance(partition, Partition):
            text, entries = partition.to_parts()
        else:
            asked = message.entries[0]
            text, entries = {}, [Entry(asked.table, asked.part, status=partition)]
        self._send(message, entries, text)

    def init(self, message: Message) -> None:
        answer = _Answer(message, self._send)
        if message.flags == PROBE:
            for index, entry in enumerate(message.entries):
                partition = self._find(entry)
                if isinstance(partition, Partition) and partition.table.layout != entry.version:
                    answer.decide(index, Status.REFUSED)
                elif isinstance(partition, Partition):
                    safe = self._when_safe(answer, index, None)
                    self._replicator.wait(entry.key, partition.version, safe)
                else:
                    answer.decide(index, partition)
            return
        entry = message.entries[0]
        partition = self._find(entry)
        safe = self._when_done(answer)
        text = message.text or {}
        if message.flags == CREATE and isinstance(partition, Partition):
            self._replicator.wait(entry.key, partition.version, safe)
        elif message.flags == SET_UPDATER and isinstance(partition, Partition):
            partition.set_updater(updater_from(text["updater"]))
            self.copies.drop(entry.key)
            self._replicator.created(entry.key, safe)
        elif partition is Status.MOVED or message.flags == SET_UPDATER:
            assert isinstance(partition, Status)
            answer.decide_all(partition)
        else:
            if message.flags == CREATE:
                if entry.values is None:
                    raise ValueError("a part without values")
                table = Table.from_dict(text["table"])
                new = Partition.new(table, entry.part, updater_from(text["updater"]), entry.values)
            else:
                new = Partition.from_parts(text, message.entries)
                if isinstance(partition, Partition):  # who pushed what is older than the snapshot
                    new.pushed_at = partition.pushed_at
                    new.applied, new.version = partition.applied, partition.version + 1
                    new.marks = partition.marks
            new.stepped = self._clocks.slowest
            self._partitions[entry.key] = new
            self.copies.drop(entry.key)
            self._replicator.created(entry.key, safe)

    def _when_done(self, answer: _Answer) -> Callable[[bool], None]:
        def decide(is_safe: bool) -> None:
            answer.decide_all(Status.OK if is_safe else Status.MOVED)

        return decide
