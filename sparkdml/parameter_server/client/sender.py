"""The client's thread: it sends requests to the servers of their partitions until answered.

Requests to one part go in order, in a lane. An answer takes its request off the lane; if the part
moves to another server, or a connection lost something on its way, all that is left on the lane
goes again, in order. Pushes are numbered, so that the servers know those they have had. Losses are
found by counting, not by waiting: a read may well wait for long, for a worker that is slow but
alive.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import zmq

from sparkdml.errors import CommunicationError
from sparkdml.network.timeouts import SERVER_PING_SECONDS, SERVER_RETRY_SECONDS
from sparkdml.parameter_server.client.base import Ask
from sparkdml.parameter_server.client.requests import Request, ServerConnection
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.partition import Key
from sparkdml.parameter_server.stats import ClientStats
from sparkdml.parameter_server.view import View
from sparkdml.parameter_server.wire.frames import (
    LEAVE,
    MIN_BYTES,
    ROWS_NAMED,
    Entry,
    Kind,
    Message,
    Status,
    signature_of,
)
from sparkdml.parameter_server.wire.sockets import Outbox, Watcher, new_number


class Sender:
    """Runs until closed. `submit` may be called from any thread; callbacks come on this one."""

    def __init__(self, worker: int, config: ServerConfig, ask: Ask, stats: ClientStats) -> None:
        self.worker, self.own = worker, new_number()
        self._config, self._ask, self._stats = config, ask, stats
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._watcher = Watcher()
        self._lock = threading.Lock()
        self._submitted: deque[Request] = deque()
        self._lanes: defaultdict[Key, deque[Request]] = defaultdict(deque)
        self._unsent: list[Request] = []
        self._retries: dict[Key, float] = {}
        self._connections: dict[int, ServerConnection] = {}  # by server
        self._view = View()
        self._new_view: View | None = None
        self._clock = 0
        self.busy_seconds = 0.0  # that the last clock took, without its waits
        self.moved_on = 0  # the clock to continue at after an expulsion
        self.start_clock: int | None = None  # where this worker begins; known after the greeting
        self.greeted = threading.Event()
        self._news = threading.Event()
        self._stop = threading.Event()
        self._leaving = False
        self.error: Exception | None = None
        self._threads = [
            threading.Thread(target=target, name=f"sparkdml-client-{name}", daemon=True)
            for name, target in (("sender", self._run), ("membership", self._talk))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: list[Request]) -> None:
        with self._lock:
            if self.error is None and not self._stop.is_set():
                self._submitted.extend(requests)
                self._watcher.wake()
                return
        error = self.error or CommunicationError("the client is closed")
        for request in requests:
            request.failed(error)

    def report_clock(self, clock: int) -> None:
        """Tell every server, and repeat it to those that don't answer."""
        self._clock = max(self._clock, clock)
        self._watcher.wake()

    def close(self, leave: bool) -> None:
        self._leaving = leave
        self._stop.set()
        self._news.set()
        self._watcher.wake()
        for thread in self._threads:
            thread.join(timeout=self._config.timeout_seconds)
        self._watcher.close()
        self._context.term()

    # The membership -----------------------------------------------------------------------------

    def ask(self, what: str, **fields: Any) -> Any:
        view = self._new_view or self._view
        answer = self._ask(
            what,
            worker=self.worker,
            number=self.own,
            generation=view.generation,
            roster=view.roster,
            **fields,
        )
        if answer is not None and "view" in answer:
            view = View.from_dict(answer["view"])
            with self._lock:
                known = self._new_view or self._view
                if (view.generation, view.roster) > (known.generation, known.roster):
                    self._new_view = view
            self._watcher.wake()
        return answer

    def _talk(self) -> None:
        try:
            self._join_and_beat()
        except Exception as error:
            self.give_up(CommunicationError(f"the client can't talk to the driver: {error!r}"))

    def give_up(self, error: Exception) -> None:
        """From any thread: everything under way fails."""
        self.error = self.error or error
        self._stop.set()
        self._watcher.wake()

    def _join_and_beat(self) -> None:
        what = "server.worker_join"
        while not self._stop.is_set():
            answer = self.ask(what, clock=self._clock, busy_seconds=self.busy_seconds)
            if answer is not None and answer.get("failed"):
                self.give_up(CommunicationError(answer["failed"]))
            elif answer is not None:
                # A client that was declared dead rejoins with its number: its pushes still count.
                what = "server.worker_join" if answer.get("expelled") else "server.worker_beat"
            if what == "server.worker_beat":
                self._news.wait(self._config.beat_seconds)
            else:
                self._stop.wait(SERVER_RETRY_SECONDS)
            self._news.clear()
        if self._leaving:
            self.ask("server.worker_leave")

    def _take_view(self) -> None:
        with self._lock:
            view, self._new_view = self._new_view, None
            if view is None:
                return
            old, self._view = self._view, view
        for server_id, connection in list(self._connections.items()):
            member = view.members.get(server_id)
            if member is None or member.number != connection.outbox.server:
                self._send_again(connection)
                self._watcher.remove(connection.outbox.socket)
                connection.outbox.close()
                del self._connections[server_id]
        for server_id, member in view.members.items():
            if server_id not in self._connections:
                self._connections[server_id] = ServerConnection(
                    Outbox(
                        self._context,
                        member.address,
                        own=self.own,
                        server=member.number,
                        key=self._config.key,
                        dropped=self._stats.dropped,
                    )
                )
                self._watcher.add(self._connections[server_id].outbox.socket)
        for connection in self._connections.values():
            connection.clock_told = -1  # a server that declared us dead must hear from us again
        # Parts may have moved between servers that are both alive.
        if old.servers and view.servers and view.generation != old.generation:
            for key in self._lanes:
                if view.primary(key) != old.primary(key):
                    self._retries[key] = 0.0

    # The loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
            if self._leaving:
                self._greet(LEAVE)
        except Exception as error:
            self._fail(error)  # raised by all waits and later requests
        finally:
            self._fail(CommunicationError("the client is closed"))
            for connection in self._connections.values():
                connection.outbox.close(linger_seconds=1.0 if self._leaving else 0.0)

    def _turn(self) -> None:
        ready = self._watcher.wait(20 if self._retries else 100)
        self._take_view()
        for connection in list(self._connections.values()):
            if connection.outbox.socket in ready:
                while (message := connection.outbox.receive()) is not None:
                    self._take_answer(connection, message)
                self._look_for_losses(connection)
        with self._lock:
            submitted = list(self._submitted)
            self._submitted.clear()
        for request in submitted:
            self._lanes[request.entry.key].append(request)
        self._unsent += submitted
        self._retry()
        self._keep_in_touch()  # before the reads that count on the clock
        self._send_unsent()

    def _retry(self) -> None:
        now = time.monotonic()
        due = [key for key, when in self._retries.items() if when <= now]
        for key in due:
            del self._retries[key]
            lane = self._lanes.get(key, ())
            for request in lane:
                if request.under_way:
                    self._stats.resent += 1
                request.under_way = False
            # In their order: those that wait to be sent the first time are the last on the lane.
            self._unsent = [r for r in self._unsent if r.entry.key != key] + list(lane)

    def _send_unsent(self) -> None:
        if not self._view.servers:
            return
        for request in self._unsent:
            if request.finished:
                continue
            connection = self._connections[self._view.primary(request.entry.key)]
            if not connection.fits(request):
                self._send_batch(connection)
            connection.batch.append(request)
            connection.batch_bytes += request.size
            request.under_way = True
        self._unsent = []
        for connection in self._connections.values():
            if connection.batch:
                self._send_batch(connection)
        queue = sum(len(connection.under_way) for connection in self._connections.values())
        self._stats.longest_queue = max(self._stats.longest_queue, queue)

    def _send_batch(self, connection: ServerConnection) -> None:
        batch, connection.batch, connection.batch_bytes = connection.batch, [], 0
        first = batch[0]
        message = Message(
            first.kind,
            [self._shorten(connection, request) for request in batch] + list(first.more),
            clock=first.clock,
            generation=self._view.generation,
            roster=self._view.roster,
            text=first.text,
            flags=first.flags,
        )
        connection.under_way[connection.outbox.send(message)] = batch

    def _shorten(self, connection: ServerConnection, request: Request) -> Entry:
        """Name rows that the server knows by their signature."""
        entry = request.entry
        if entry.rows is None or entry.rows.nbytes < MIN_BYTES:
            return entry
        request.signature = request.signature or signature_of(entry.rows)
        entry.session = request.signature
        if connection.known_rows.get(entry.key) != request.signature:
            return entry
        return replace(entry, rows=None, flags=ROWS_NAMED)

    def _take_answer(self, connection: ServerConnection, message: Message) -> None:
        connection.last_heard = time.monotonic()
        if (message.generation, message.roster) > (self._view.generation, self._view.roster):
            self._news.set()
        if message.answers == connection.hello_number:
            self._take_greeting(connection, message)
            return
        batch = connection.under_way.pop(message.answers, [])
        for index, request in enumerate(batch):
            if not request.finished and index < len(message.entries):
                self._take_entry(connection, request, message, message.entries[index])

    def _take_entry(
        self, connection: ServerConnection, request: Request, message: Message, entry: Entry
    ) -> None:
        key = request.entry.key
        if request.signature:
            connection.known_rows[key] = request.signature
        over = entry.status in (Status.OK, Status.REFUSED, Status.NOT_FINITE, Status.REPEATED)
        if over or (entry.status == Status.UNKNOWN and request.may_be_unknown):
            request.finished = True
            lane = self._lanes[key]
            lane.remove(request)
            if not lane:
                del self._lanes[key]
            request.done(message, entry)
            return
        connection.known_rows.pop(key, None)
        now = time.monotonic()
        request.trouble_since = request.trouble_since or now
        if now - request.trouble_since > self._config.timeout_seconds:
            raise CommunicationError(
                f"a part of a table could not be found on any server for "
                f"{self._config.timeout_seconds:g} s (timeout_seconds): it was lost with more "
                "servers than there are replicas. Resume from a checkpoint"
            )
        if entry.status in (Status.GAP, Status.ROWS_UNKNOWN):
            self._retries.setdefault(key, now)
        else:
            self._news.set()
            self._retries.setdefault(key, now + SERVER_RETRY_SECONDS)

    # Losses -------------------------------------------------------------------------------------

    def _keep_in_touch(self) -> None:
        """Report the clock; ask servers with unanswered requests what they have received."""
        now = time.monotonic()
        for connection in self._connections.values():
            unanswered = connection.hello_number or connection.under_way
            new_clock = connection.clock_told != self._clock
            if new_clock or (unanswered and now - connection.last_hello > SERVER_PING_SECONDS):
                self._greet_one(connection, 0)
            if not unanswered:
                connection.last_heard = now
            elif now - connection.last_heard > self._config.timeout_seconds:
                raise CommunicationError(
                    f"a server has been silent for {self._config.timeout_seconds:g} s "
                    "(timeout_seconds), and the driver has not replaced it"
                )

    def _greet(self, flags: int) -> None:
        for connection in self._connections.values():
            self._greet_one(connection, flags)

    def _greet_one(self, connection: ServerConnection, flags: int) -> None:
        hello = Entry(0, 0, worker=self.worker)
        connection.hello_number = connection.outbox.send(
            Message(
                Kind.HELLO,
                [hello],
                clock=self._clock,
                generation=self._view.generation,
                roster=self._view.roster,
                flags=flags,
            )
        )
        connection.last_hello = time.monotonic()
        connection.clock_told = self._clock

    def _take_greeting(self, connection: ServerConnection, message: Message) -> None:
        entry = message.entries[0]
        lost = connection.hello_number - entry.version
        connection.hello_number = 0
        if lost > connection.num_lost:
            connection.num_lost = lost
            self._send_again(connection)
        connection.greeted = True
        self.moved_on = max(self.moved_on, entry.clock)
        if self.start_clock is None or not self.greeted.is_set():
            self.start_clock = max(self.start_clock or 0, entry.clock)
            if all(self._connections[server_id].greeted for server_id in self._view.servers):
                self._clock = max(self._clock, self.start_clock)
                self.greeted.set()

    def _look_for_losses(self, connection: ServerConnection) -> None:
        if connection.outbox.num_missed:
            connection.outbox.num_missed = 0
            self._send_again(connection)

    def _send_again(self, connection: ServerConnection) -> None:
        for batch in connection.under_way.values():
            for request in batch:
                if not request.finished:
                    self._retries[request.entry.key] = 0.0
        connection.under_way.clear()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.error = self.error or error
            left = [*self._submitted, *(r for lane in self._lanes.values() for r in lane)]
            self._submitted.clear()
            self._lanes.clear()
        for request in left:
            request.failed(self.error)
        self.greeted.set()
