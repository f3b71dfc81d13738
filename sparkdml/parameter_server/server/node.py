"""A server: one loop on one thread that receives messages, changes partitions, and answers.

A second thread asks the driver's membership, which may be slow. What a node does with a message
depends on three things only: the view, the workers' clocks, and its partitions. `ServerThread` runs
a server on a thread of its own, in a process that does other things as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import zmq

from sparkdml.errors import CommunicationError, SparkDMLError
from sparkdml.network.timeouts import SERVER_CLOSE_SECONDS
from sparkdml.parameter_server.client.base import Ask
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import Clocks
from sparkdml.parameter_server.partition import Key
from sparkdml.parameter_server.server.replicator import Replicator
from sparkdml.parameter_server.server.request_handler import RequestHandler, Text
from sparkdml.parameter_server.stats import NodeStats
from sparkdml.parameter_server.stored_partition import Partition
from sparkdml.parameter_server.view import View
from sparkdml.parameter_server.wire.frames import LEAVE, STEP, Entry, Kind, Message, Status
from sparkdml.parameter_server.wire.sockets import Inbox, Watcher, check_bindable, own_address

POLL_MILLISECONDS = 100


class ServerNode:
    """One start of one server. `run` returns whether it should be started again."""

    def __init__(
        self, server_id: int, config: ServerConfig, ask: Ask, host: str = "127.0.0.1"
    ) -> None:
        check_bindable(host)
        self.server_id = server_id
        self.stats = NodeStats()
        self._config, self._ask = config, ask
        self._keep = config.consistency.aggregates
        self._stand_in = config.consistency.stands_in
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox = Inbox(self._context, host, config.key, self.stats.dropped)
        self.address = own_address(host, self._inbox.port)
        self._watcher = Watcher()
        self._watcher.add(self._inbox.socket)
        self._watcher.add(self._inbox.authenticator.socket)
        self._partitions: dict[Key, Partition] = {}
        self._clocks = Clocks()
        self._clocks.expect((), started=False)
        self._early: list[Message] = []  # greetings that wait for a newer view
        self._view = View()
        self._replicator = Replicator(
            server_id,
            self._inbox.own,
            key=config.key,
            context=self._context,
            watcher=self._watcher,
            partitions=self._partitions,
            stats=self.stats,
            look_again=self._look_again,
        )
        self._request_handler = RequestHandler(
            config,
            self._partitions,
            clocks=self._clocks,
            replicator=self._replicator,
            stats=self.stats,
            send=self._answer,
        )
        self._advanced_at = (0, 0, 0)
        self._news = threading.Event()  # ask the membership now
        self._new_view: View | None = None
        self._stop = threading.Event()
        self._declared_dead = False
        self._failure: str | None = None

    @property
    def num_copies(self) -> int:
        """The copies of parts, for snapshot readers."""
        return len(self._request_handler.copies)

    def stop(self) -> None:
        """From any thread: end the loop soon."""
        self._stop.set()
        self._news.set()
        self._watcher.wake()

    def run(self) -> bool:
        """Serve until told to stop; True if the driver declared it dead, and it may rejoin."""
        talk = threading.Thread(target=self._talk, name="sparkdml-server-talk", daemon=True)
        talk.start()
        try:
            self._loop()
        finally:
            self.stop()
            talk.join(timeout=SERVER_CLOSE_SECONDS)
            self._replicator.close()
            self._inbox.close()
            self._watcher.close()
            self._context.term()
        if self._failure is not None:
            raise CommunicationError(f"server {self.server_id}: {self._failure}")
        return self._declared_dead

    def _loop(self) -> None:
        while not self._stop.is_set():
            ready = self._watcher.wait(POLL_MILLISECONDS)
            if self._inbox.authenticator.socket in ready:
                self._inbox.authenticator.answer()
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
        try:
            self._join_and_beat()
        except Exception as error:
            self._failure = f"it can't talk to the driver: {error!r}"
            self.stop()

    def _join_and_beat(self) -> None:
        what = "server.join"
        known = View()
        while not self._stop.is_set():
            answer = self._ask(
                what,
                server_id=self.server_id,
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
                    self._declared_dead = bool(answer.get("expelled"))
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
        self._clocks.expel(view.expelled)
        self._request_handler.sessions = frozenset(view.workers.values())
        if (view.generation, view.roster) != (old.generation, old.roster):
            self._request_handler.copies.begin_roster(view.roster)
        early, self._early = self._early, []
        for message in early:
            self._hello(message)

    # Messages -----------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        with self._nonsense_is_refused(message):
            if message.kind is Kind.PUSH:
                if self._is_of_an_earlier_life(message):
                    self._refuse(message, "earlier life")
                    return
                self._request_handler.find_rows(message)
                self._request_handler.push(message)
            elif message.kind is Kind.PULL:
                self._request_handler.find_rows(message)
                self._request_handler.pull(message)
            elif message.kind is Kind.INIT:
                self._request_handler.init(message)
            elif message.kind is Kind.HELLO:
                self._hello(message)
            elif message.kind is Kind.REPLICATE:
                answer = self._replicator.take_changes(message, self._keep, self._stand_in)
                self._inbox.send(answer, message.sender)
            elif message.kind is Kind.INSTALL:
                self._inbox.send(self._replicator.take_copy(message), message.sender)
            else:
                raise ValueError("nothing that a server is asked")
        if message.generation > self._view.generation or message.roster > self._view.roster:
            self._look_again()

    def _is_of_an_earlier_life(self, message: Message) -> bool:
        """Whether a marked push arrives late, from a worker that has rejoined since.

        The new worker was told the old one's progress, which must not change any more.
        """
        return any(
            entry.mark and self._view.workers.get(entry.worker, message.sender) != message.sender
            for entry in message.entries
        )

    @contextmanager
    def _nonsense_is_refused(self, message: Message) -> Iterator[None]:
        """Refuse a malformed message, which even a sender with the key may send.

        The sender gets an answer, so that it does not wait indefinitely.
        """
        try:
            yield
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            if isinstance(error, SparkDMLError) and not isinstance(error, ValueError):
                raise
            self._refuse(message, "form")

    def _refuse(self, message: Message, why: str) -> None:
        self.stats.dropped[why] += 1
        entries = [Entry(e.table, e.part, status=Status.REFUSED) for e in message.entries]
        self._answer(message, entries)

    def _answer(self, question: Message, entries: list[Entry], text: Text = None) -> None:
        reply = Message(
            Kind.ANSWER,
            entries,
            answers=question.number,
            generation=self._view.generation,
            roster=self._view.roster,
            clock=self._clocks.slowest,
            text=text,
        )
        self._inbox.send(reply, question.sender)

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
            self._clocks.finish(worker, message.clock)  # perhaps it has not been told before
            self._clocks.leave(worker)
            for partition in self._partitions.values():
                partition.forget(message.sender)
        elif self._clocks.clock_of(worker) is None and message.clock == 0:
            self._clocks.join(worker)
        else:
            self._clocks.finish(worker, message.clock)
        answer = Entry(0, 0, worker=worker, version=self._inbox.num_received(message.sender))
        answer.clock = self._clocks.clock_of(worker) or 0  # where a worker that joins begins
        self._answer(message, [answer])

    def _advance(self) -> None:
        """Make the steps that are due, and serve the reads that waited for them."""
        slowest = self._clocks.slowest
        at = (slowest, self._view.generation, len(self._partitions))
        if self._keep and at != self._advanced_at:
            self._advanced_at = at
            for key in self._replicator.parts:
                partition = self._partitions[key]
                while partition.stepped < slowest:
                    before = partition.generation
                    absent = self._view.expelled if self._stand_in else ()
                    partition.step(absent)
                    entry = Entry(*key, flags=STEP)
                    if absent:
                        entry.values = torch.tensor(absent, dtype=torch.int64)
                    self._replicator.changed(partition, entry, before, None)
                    self._request_handler.copies.stepped(key, partition)
        for message in self._request_handler.waiting_reads():
            with self._nonsense_is_refused(message):
                self._request_handler.pull(message)


def serve(
    server_id: int,
    config: ServerConfig,
    ask: Ask,
    host: str = "127.0.0.1",
    on_start: Callable[[ServerNode], None] | None = None,
) -> None:
    """Run a server until the driver stops it; start again, empty, if it was declared dead."""
    while True:
        node = ServerNode(server_id, config, ask, host)
        if on_start is not None:
            on_start(node)
        if not node.run():
            return
        time.sleep(config.beat_seconds)


class ServerThread(threading.Thread):
    """Started once. `error` is what ended it, if it was not told to stop."""

    def __init__(self, server_id: int, config: ServerConfig, ask: Ask, host: str) -> None:
        super().__init__(name=f"sparkdml-server-{server_id}", daemon=True)
        self._arguments = server_id, config, ask, host
        self._node: ServerNode | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            serve(*self._arguments, on_start=self._keep)
        except BaseException as error:  # for who stops it
            self.error = error

    def _keep(self, node: ServerNode) -> None:
        with self._lock:
            self._node = node
            if self._stopping:
                node.stop()

    def stop(self) -> None:
        self.ask_to_stop()
        self.join(SERVER_CLOSE_SECONDS)

    def ask_to_stop(self) -> None:
        with self._lock:
            self._stopping = True
            if self._node is not None:
                self._node.stop()
