"""A server: one loop on one thread that takes messages, changes shards, and answers.

A second thread talks to the driver's membership, since that may take its time. What a node does
with a message depends on three things only: the view, the clocks of the workers, and its shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import zmq

from sparkdml.errors import CommunicationError, SparkDMLError
from sparkdml.server.base import Ask
from sparkdml.server.config import ServerConfig
from sparkdml.server.consistency.base import Clocks
from sparkdml.server.frames import ROWS_NAMED, Entry, Kind, Message, Status
from sparkdml.server.keys import Key, Table
from sparkdml.server.optimizers import updater_from
from sparkdml.server.replicator import PUSH, SKIP, STEP, Replicator
from sparkdml.server.row_cache import RowCache
from sparkdml.server.shard import Shard
from sparkdml.server.stats import NodeStats
from sparkdml.server.view import View
from sparkdml.server.wire import Inbox, Watcher, check_bindable, own_address

# Flags of messages from workers.
CREATE, RESTORE, SET_UPDATER, PROBE = 0, 1, 2, 3  # of INIT
LEAVE = 1  # of HELLO
HALF, WHOLE = 1, 2  # of PULL

POLL_MILLISECONDS = 100


class _Answer:
    """Gathers what became of a message's entries, and goes when the last one is decided."""

    def __init__(self, message: Message, send: Callable[[_Answer], None]) -> None:
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
            self._send(self)

    def decide_all(self, status: Status) -> None:
        for index in range(len(self.entries)):
            self.decide(index, status)


class ServerNode:
    """One start of one server. `run` returns whether it should be started again."""

    def __init__(self, seat: int, config: ServerConfig, ask: Ask, host: str = "127.0.0.1") -> None:
        check_bindable(host)
        self.seat = seat
        self.stats = NodeStats()
        self._config, self._ask = config, ask
        self._keep = config.consistency.aggregates
        self._stand_in = config.consistency.stands_in
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = Inbox(self._context, host, config.key, self.stats.dropped)
        self.address = own_address(host, self._inbox.port)
        self._watcher = Watcher()
        self._watcher.add(self._inbox.socket)
        self._watcher.add(self._inbox.door.socket)
        self._shards: dict[Key, Shard] = {}
        self._clocks = Clocks()
        self._clocks.expect((), started=False)
        self._early: list[Message] = []  # greetings that wait for a newer view
        self._view = View()
        self._replicator = Replicator(
            seat,
            self._inbox.own,
            config.key,
            self._context,
            self._watcher,
            self._shards,
            self.stats,
            self._look_again,
        )
        self._rows = RowCache()
        self._advanced_at = (0, 0, 0)
        self._reads: list[Message] = []  # those that wait for the clock
        self._news = threading.Event()  # ask the membership now
        self._new_view: View | None = None
        self._stop = threading.Event()
        self._expelled = False
        self._failure: str | None = None

    def stop(self) -> None:
        """From any thread: end the loop soon."""
        self._stop.set()
        self._news.set()
        self._watcher.wake()

    def run(self) -> bool:
        """Serve until told to stop; True if the driver took it for dead, and it may come back."""
        talk = threading.Thread(target=self._talk, name="sparkdml-server-talk", daemon=True)
        talk.start()
        try:
            self._loop()
        finally:
            self.stop()
            talk.join(timeout=10)
            self._replicator.close()
            self._inbox.close()
            self._watcher.close()
            self._context.term()
        if self._failure is not None:
            raise CommunicationError(f"server {self.seat}: {self._failure}")
        return self._expelled

    def _loop(self) -> None:
        while not self._stop.is_set():
            ready = self._watcher.wait(POLL_MILLISECONDS)
            if self._inbox.door.socket in ready:
                self._inbox.door.answer()
            self._take_view()
            self._replicator.receive(ready)
            # A bounded number, so that acknowledgements are not kept waiting by a flood.
            for _ in range(64 if self._inbox.socket in ready else 0):
                message = self._inbox.receive()
                if message is None:
                    break
                self._handle(message)
            self._advance()
            self._replicator.resend()
            self._replicator.flush()

    # The membership -----------------------------------------------------------------------------

    def _look_again(self) -> None:
        self._news.set()

    def _talk(self) -> None:
        """On a thread of its own: join, then beat, and bring new views to the loop."""
        what = "server.join"
        known = View()
        while not self._stop.is_set():
            answer = self._ask(
                what,
                seat=self.seat,
                number=self._inbox.own,
                address=self.address,
                generation=known.generation,
                roster=known.roster,
                settled=self._replicator.settled,
            )
            if answer is not None:
                what = "server.beat"
                if answer.get("failed") or answer.get("expelled") or answer.get("stop"):
                    self._failure = answer.get("failed")
                    self._expelled = bool(answer.get("expelled"))
                    self.stop()
                elif "view" in answer:
                    known = self._new_view = View.from_dict(answer["view"])
                    self._watcher.wake()
            self._news.wait(self._config.beat_seconds)
            self._news.clear()

    def _take_view(self) -> None:
        view, self._new_view = self._new_view, None
        if view is None:
            return
        old, self._view = self._view, view
        if view.generation != old.generation:
            self._replicator.adopt(view)
        for worker in self._clocks.workers:
            if worker not in view.workers or view.workers[worker] != old.workers.get(worker):
                self._clocks.die(worker)
        self._clocks.expect(view.workers, view.started)
        self._clocks.excuse(view.excused)
        early, self._early = self._early, []
        for message in early:
            self._hello(message)

    # Messages -----------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        try:
            if message.kind is Kind.PUSH:
                self._find_rows(message)
                self._push(message)
            elif message.kind is Kind.PULL:
                self._find_rows(message)
                if not self._pull(message):
                    self._reads.append(message)
                    self.stats.longest_queue = max(self.stats.longest_queue, len(self._reads))
            elif message.kind is Kind.HELLO:
                self._hello(message)
            elif message.kind is Kind.INIT:
                self._init(message)
            elif message.kind is Kind.REPLICATE:
                answer = self._replicator.take_changes(message, self._keep, self._stand_in)
                self._inbox.send(answer, message.sender)
            elif message.kind is Kind.INSTALL:
                self._inbox.send(self._replicator.take_copy(message), message.sender)
            else:
                self.stats.dropped["form"] += 1
        except (ValueError, KeyError, TypeError, IndexError, StopIteration, RuntimeError) as error:
            # It came from someone with the key, and is nonsense all the same.
            if isinstance(error, SparkDMLError) and not isinstance(error, ValueError):
                raise
            self.stats.dropped["form"] += 1
        if message.generation > self._view.generation or message.roster > self._view.roster:
            self._look_again()

    def _send(self, answer: _Answer) -> None:
        reply = Message(
            Kind.ANSWER,
            answer.entries,
            answers=answer.message.number,
            generation=self._view.generation,
            roster=self._view.roster,
            clock=self._clocks.slowest,
        )
        self._inbox.send(reply, answer.message.sender)

    def _find_rows(self, message: Message) -> None:
        """Put back the rows that were named by a signature, and remember those that were sent."""
        for entry in message.entries:
            entry.status = Status.OK
            if entry.flags & ROWS_NAMED:
                entry.rows = self._rows.find(message.sender, entry.key, entry.session)
                if entry.rows is None:
                    entry.status = Status.ROWS_UNKNOWN
                else:
                    self.stats.rows_named += 1
            elif entry.rows is not None and entry.session:
                self._rows.keep(message.sender, entry.key, entry.session, entry.rows)

    def _find(self, entry: Entry) -> Shard | Status:
        if not self._replicator.is_primary(entry.key):
            return Status.MOVED
        if entry.status:
            return Status(entry.status)
        return self._shards.get(entry.key) or Status.UNKNOWN

    def _push(self, message: Message) -> None:
        answer = _Answer(message, self._send)
        for index, entry in enumerate(message.entries):
            entry.session, entry.clock = message.sender, message.clock
            shard = self._find(entry)
            if not isinstance(shard, Shard):
                answer.decide(index, shard)
                continue
            status = shard.check(entry, self._config.finite_only)
            safe = self._when_safe(answer, index, status)
            if status is Status.GAP:
                answer.decide(index, status)
            elif entry.number <= shard.applied.get(entry.session, 0):
                self.stats.repeated += 1
                # The first time it may not be safe yet.
                self._replicator.wait(entry.key, shard.version, safe)
            else:
                before = shard.generation
                entry.flags = PUSH if status is Status.OK else SKIP
                if status is Status.OK:
                    shard.take(shard.push_from(entry), self._keep, self._stand_in)
                else:
                    self.stats.dropped["refused"] += 1
                    shard.skip(entry.session, entry.number)
                    entry.rows = entry.values = None
                self._replicator.changed(shard, entry, before, safe)

    def _when_safe(
        self, answer: _Answer, index: int, pushed: Status | None
    ) -> Callable[[bool], None]:
        """Decide an entry once its change is at all replicas; `pushed`: what became of a push."""

        def decide(is_safe: bool) -> None:
            self.stats.pushes += is_safe and pushed is Status.OK
            answer.decide(index, (pushed or Status.OK) if is_safe else Status.MOVED)

        return decide

    def _pull(self, message: Message) -> bool:
        """Answer a read, if the clock allows it; whether it did."""
        clock, slowest = message.clock, self._clocks.slowest
        if not self._config.consistency.may_read(clock, slowest):
            return False
        found = [self._find(entry) for entry in message.entries]
        if self._keep and any(isinstance(s, Shard) and s.stepped < clock for s in found):
            return False
        answer = _Answer(message, self._send)
        if message.flags & WHOLE:
            self._send_whole(message, found[0])
            return True
        for index, (entry, shard) in enumerate(zip(message.entries, found, strict=True)):
            if not isinstance(shard, Shard):
                answer.decide(index, shard)
            elif entry.number > shard.applied.get(message.sender, 0):
                answer.decide(index, Status.GAP)
            elif (
                entry.rows is not None
                and len(entry.rows)
                and not (int(entry.rows.min()) >= 0 and int(entry.rows.max()) < len(shard.values))
            ):
                answer.decide(index, Status.REFUSED)
            else:
                values = (
                    shard.values.clone()  # it may change before it is sent
                    if entry.rows is None
                    else shard.values[entry.rows.to(torch.int64)]
                )
                if message.flags & HALF and values.dtype.is_floating_point:
                    values = values.half()
                answer.entries[index].values = values.reshape(-1)
                self.stats.pulls += 1
                answer.decide(index, Status.OK)
        return True

    def _send_whole(self, message: Message, shard: Shard | Status) -> None:
        """A part with all that belongs to it, for a checkpoint."""
        if isinstance(shard, Shard):
            text, entries = shard.to_parts()
        else:
            asked = message.entries[0]
            text, entries = {}, [Entry(asked.table, asked.part, status=shard)]
        reply = Message(
            Kind.ANSWER,
            entries,
            answers=message.number,
            generation=self._view.generation,
            clock=self._clocks.slowest,
            text=text,
        )
        self._inbox.send(reply, message.sender)

    def _init(self, message: Message) -> None:
        answer = _Answer(message, self._send)
        if message.flags == PROBE:
            for index, entry in enumerate(message.entries):
                shard = self._find(entry)
                if isinstance(shard, Shard):
                    safe = self._when_safe(answer, index, None)
                    self._replicator.wait(entry.key, shard.version, safe)
                else:
                    answer.decide(index, shard)
            return
        entry = message.entries[0]
        shard = self._find(entry)
        safe = self._when_done(answer)
        text = message.text or {}
        if message.flags == CREATE and isinstance(shard, Shard):
            self._replicator.wait(entry.key, shard.version, safe)
        elif message.flags == SET_UPDATER and isinstance(shard, Shard):
            shard.set_updater(updater_from(text["updater"]))
            self._replicator.created(entry.key, safe)
        elif shard is Status.MOVED or message.flags == SET_UPDATER:
            assert isinstance(shard, Status)
            answer.decide_all(shard)
        else:
            if message.flags == CREATE:
                if entry.values is None:
                    raise ValueError("a part without values")
                table = Table.from_dict(text["table"])
                new = Shard.new(table, entry.part, updater_from(text["updater"]), entry.values)
            else:
                new = Shard.from_parts(text, message.entries)
                if isinstance(shard, Shard):  # who pushed what is older than the snapshot
                    new.applied, new.version = shard.applied, shard.version + 1
            new.stepped = self._clocks.slowest
            self._shards[entry.key] = new
            self._replicator.created(entry.key, safe)

    def _when_done(self, answer: _Answer) -> Callable[[bool], None]:
        def decide(is_safe: bool) -> None:
            answer.decide_all(Status.OK if is_safe else Status.MOVED)

        return decide

    # Clocks -------------------------------------------------------------------------------------

    def _hello(self, message: Message) -> None:
        worker = message.entries[0].worker
        if message.roster > self._view.roster:
            # It knows of workers that we don't: their clocks, and the start, come first.
            self._early.append(message)
            return
        if self._view.workers.get(worker) != message.sender:
            return  # it is thought to be dead, and must join first; or has joined in another life
        if message.flags == LEAVE:
            self._clocks.leave(worker)
        elif self._clocks.clock_of(worker) is None and message.clock == 0:
            self._clocks.join(worker)
        else:
            self._clocks.finish(worker, message.clock)
        answer = _Answer(message, self._send)
        own = answer.entries[0]
        own.clock = self._clocks.clock_of(worker) or 0  # where a worker that joins begins
        own.version = self._inbox.num_received(message.sender)
        answer.decide(0, Status.OK)

    def _advance(self) -> None:
        """Make the steps that are due, and serve the reads that waited for them."""
        slowest = self._clocks.slowest
        at = (slowest, self._view.generation, len(self._shards))
        if self._keep and at != self._advanced_at:
            self._advanced_at = at
            for key in self._replicator.parts:
                shard = self._shards[key]
                while shard.stepped < slowest:
                    before = shard.generation
                    absent = self._view.excused if self._stand_in else ()
                    shard.step(absent)
                    entry = Entry(*key, flags=STEP)
                    if absent:
                        entry.values = torch.tensor(absent, dtype=torch.int64)
                    self._replicator.changed(shard, entry, before, None)
        self._reads = [message for message in self._reads if not self._pull(message)]


def serve(
    seat: int,
    config: ServerConfig,
    ask: Ask,
    host: str = "127.0.0.1",
    on_start: Callable[[ServerNode], None] | None = None,
) -> None:
    """Run a server until the driver says stop; start again, empty, if it was taken for dead."""
    while True:
        node = ServerNode(seat, config, ask, host)
        if on_start is not None:
            on_start(node)
        if not node.run():
            return
        time.sleep(config.beat_seconds)
