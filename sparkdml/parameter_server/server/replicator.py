"""The traffic between servers: changes and whole copies, sent, taken and acknowledged.

The rules are in `replication.py`; this module sends and receives, on the node's thread. Whole
copies are sent a few at a time, so that the others need not hold a second copy of everything in
memory when a server joins.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

import zmq

from sparkdml.network.timeouts import REPLICA_RESEND_SECONDS
from sparkdml.parameter_server.partition import Key
from sparkdml.parameter_server.server.replication import Standing, Verdict, judge_change, judge_copy
from sparkdml.parameter_server.stats import NodeStats
from sparkdml.parameter_server.stored_partition import Partition
from sparkdml.parameter_server.view import View
from sparkdml.parameter_server.wire.frames import (
    MAX_ENTRIES,
    SKIP,
    STEP,
    Entry,
    Kind,
    Message,
    Status,
)
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.parameter_server.wire.sockets import Outbox, Watcher

MESSAGE_BYTES = 4 << 20
COPIES_UNDER_WAY = 8
BEHIND_SECONDS = 0.05

Token = Callable[[bool], None]  # called with whether the change is safe


class Replicator:
    """Belongs to a node, and runs on its thread."""

    def __init__(
        self,
        server_id: int,
        own: int,
        key: JobKey,
        context: zmq.Context[zmq.Socket[bytes]],
        watcher: Watcher,
        partitions: dict[Key, Partition],
        stats: NodeStats,
        look_again: Callable[[], None],
    ) -> None:
        self._server_id, self._own, self._key, self._context = server_id, own, key, context
        self._watcher = watcher
        self._partitions, self._stats, self._look_again = partitions, stats, look_again
        self._view = View()
        self._standings: dict[Key, Standing[Token]] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._queue: dict[int, list[Entry]] = defaultdict(list)  # changes to send
        self._to_copy: deque[tuple[Key, int]] = deque()
        self._copying: dict[tuple[Key, int], float] = {}  # when it was sent
        self._unsettled: set[tuple[Key, int]] = set()
        self._waiting_since: dict[Key, float] = {}

    @property
    def settled(self) -> int:
        """The generation of which every replica of this server's parts has its copy."""
        return 0 if self._unsettled else self._view.generation

    def is_primary(self, key: Key) -> bool:
        return self._server_id in self._view.servers and self._view.primary(key) == self._server_id

    @property
    def parts(self) -> list[Key]:
        """Those that this server is the primary of."""
        return list(self._standings)

    def adopt(self, view: View) -> None:
        """Apply a new generation to this server."""
        old, self._view = self._view, view
        for server_id, member in old.members.items():
            if view.members.get(server_id) != member and server_id in self._outboxes:
                gone = self._outboxes.pop(server_id)
                self._watcher.remove(gone.socket)
                gone.close()
        for server_id, member in view.members.items():
            if server_id != self._server_id and server_id not in self._outboxes:
                self._outboxes[server_id] = Outbox(
                    self._context,
                    member.address,
                    own=self._own,
                    server=member.number,
                    key=self._key,
                    dropped=self._stats.dropped,
                )
                self._watcher.add(self._outboxes[server_id].socket)
        self._queue.clear()
        self._to_copy.clear()
        self._copying.clear()
        self._unsettled.clear()
        self._waiting_since.clear()
        same = {
            server_id
            for server_id in view.members
            if old.members.get(server_id) == view.members[server_id]
        }
        for key in list(self._partitions):
            self._stand(key, same)
        for key in [key for key in self._standings if key not in self._partitions]:
            del self._standings[key]

    def _stand(self, key: Key, same: set[int]) -> None:
        replicas = self._view.replicas(key)
        standing = self._standings.pop(key, None)
        if self._server_id not in replicas:
            del self._partitions[key]
        if self._server_id != replicas[0]:
            for token in standing.give_up() if standing else []:
                token(False)
            return
        if standing is None:
            standing = Standing(replicas[1:])
        else:
            for server_id in replicas[1:]:
                if server_id not in same:
                    standing.lost_track(server_id)
            standing = standing.renewed(replicas[1:])
        self._standings[key] = standing
        self._copy_where_missing(key)
        if standing.is_waiting:
            self._waiting_since[key] = time.monotonic()
        # Perhaps a replica that it waited for is gone, and no other has come.
        self._release(key, standing.acknowledged(-1, -1))

    def _copy_where_missing(self, key: Key) -> None:
        for server_id in self._standings[key].without_copy:
            if (key, server_id) not in self._unsettled:
                self._unsettled.add((key, server_id))
                self._to_copy.append((key, server_id))

    # The primary's side -------------------------------------------------------------------------

    def created(self, key: Key, token: Token) -> None:
        """A part is new or was changed as a whole: copies go to all replicas."""
        partition = self._partitions[key]
        partition.generation = self._view.generation
        standing = self._standings.get(key)
        if standing is None:
            standing = self._standings[key] = Standing(self._view.replicas(key)[1:])
        for server_id in standing.followers:
            standing.lost_track(server_id)
        self._copy_where_missing(key)
        self.wait(key, partition.version, token)

    def changed(self, partition: Partition, entry: Entry, before: int, token: Token | None) -> None:
        """Send a change that was just made here; `before` is the generation of the last one."""
        key = (partition.table.number, partition.part)
        partition.generation = self._view.generation
        standing = self._standings[key]
        entry.version, entry.generation = partition.version, before
        for server_id in standing.followers:
            standing.sent(server_id, partition.version)
            self._queue[server_id].append(entry)
        if token is not None:
            self.wait(key, partition.version, token)

    def wait(self, key: Key, version: int, token: Token) -> None:
        """Call `token` once every replica has this version."""
        self._waiting_since.setdefault(key, time.monotonic())
        self._release(key, self._standings[key].wait(version, token))

    def _release(self, key: Key, tokens: list[Token]) -> None:
        if not self._standings[key].is_waiting:
            self._waiting_since.pop(key, None)
        elif tokens:
            self._waiting_since[key] = time.monotonic()  # it moves on
        for token in tokens:
            token(True)

    def flush(self) -> None:
        """Send what has gathered: changes first, then copies, which have later ones in them."""
        for server_id, entries in self._queue.items():
            outbox = self._outboxes.get(server_id)
            while entries and outbox is not None:
                batch = _first_of(entries)
                del entries[: len(batch)]
                outbox.send(Message(Kind.REPLICATE, batch, generation=self._view.generation))
            entries.clear()
        while self._to_copy and len(self._copying) < COPIES_UNDER_WAY:
            self._send_copy(*self._to_copy.popleft())

    def _send_copy(self, key: Key, server_id: int) -> None:
        partition, standing = self._partitions.get(key), self._standings.get(key)
        if partition is None or standing is None or server_id not in self._outboxes:
            return
        text, entries = partition.to_parts()
        message = Message(Kind.INSTALL, entries, generation=self._view.generation, text=text)
        self._outboxes[server_id].send(message)
        standing.sent(server_id, partition.version)
        self._copying[key, server_id] = time.monotonic()
        self._stats.installs += 1

    def receive(self, ready: set[object]) -> None:
        """Take the replicas' answers, from the connections that have some."""
        for server_id, outbox in list(self._outboxes.items()):
            while outbox.socket in ready and (message := outbox.receive()) is not None:
                if message.generation > self._view.generation:
                    self._look_again()
                for entry in message.entries:
                    if message.generation == self._view.generation:
                        self._take_answer(server_id, entry)
                    elif (entry.key, server_id) in self._copying:
                        # It is about to hear of this generation: try again soon.
                        soon = time.monotonic() - REPLICA_RESEND_SECONDS + BEHIND_SECONDS
                        self._copying[entry.key, server_id] = soon

    def _take_answer(self, server_id: int, entry: Entry) -> None:
        standing = self._standings.get(entry.key)
        if standing is None:
            return
        self._copying.pop((entry.key, server_id), None)
        if entry.status == Status.OK:
            self._release(entry.key, standing.acknowledged(server_id, entry.version))
            if standing.has_copy(server_id):
                self._unsettled.discard((entry.key, server_id))
        else:
            standing.lost_track(server_id)
            self._unsettled.discard((entry.key, server_id))
            self._copy_where_missing(entry.key)

    def resend(self) -> None:
        """Resend copies that were not acknowledged in time, and changes, as copies."""
        if not self._copying and not self._waiting_since:
            return
        late = time.monotonic() - REPLICA_RESEND_SECONDS
        for (key, server_id), sent_at in list(self._copying.items()):
            if sent_at < late:
                del self._copying[key, server_id]
                self._to_copy.append((key, server_id))
        copying = {key for key, _ in self._copying} | {key for key, _ in self._to_copy}
        for key, since in self._waiting_since.items():
            if since < late and key not in copying:
                standing = self._standings[key]
                for server_id in standing.followers:
                    standing.lost_track(server_id)
                    self._unsettled.discard((key, server_id))
                self._copy_where_missing(key)

    # The replica's side -------------------------------------------------------------------------

    def take_changes(self, message: Message, keep: bool, stand_in: bool) -> Message:
        """Another server's changes; the answer says which were taken."""
        answer = Message(Kind.ANSWER, answers=message.number, generation=self._view.generation)
        for entry in message.entries:
            partition = self._partitions.get(entry.key)
            have = (partition.generation, partition.version) if partition else None
            before = (entry.generation, entry.version - 1)
            verdict = judge_change(self._view.generation, message.generation, have, before)
            if verdict is Verdict.BEHIND:
                self._look_again()
            if verdict is Verdict.TAKE:
                assert partition is not None
                if take_change(partition, entry, keep, stand_in):
                    partition.generation = message.generation
                else:
                    verdict = Verdict.WANT_COPY
            answer.entries.append(_answer_to(entry, verdict))
        return answer

    def take_copy(self, message: Message) -> Message:
        answer = Message(Kind.ANSWER, answers=message.number, generation=self._view.generation)
        first = message.entries[0]
        partition = self._partitions.get(first.key)
        have = (partition.generation, partition.version) if partition else None
        offered = (first.generation, first.version)
        verdict = judge_copy(self._view.generation, message.generation, have, offered)
        if verdict is Verdict.BEHIND:
            self._look_again()
        if verdict is Verdict.TAKE:
            self._partitions[first.key] = Partition.from_parts(message.text or {}, message.entries)
        answer.entries.append(_answer_to(first, verdict))
        return answer

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
        self._outboxes.clear()


def take_change(partition: Partition, entry: Entry, keep: bool, stand_in: bool) -> bool:
    """Whether the change could be made: its primary made it, so it should."""
    if entry.flags == STEP:
        partition.step(() if entry.values is None else entry.values.tolist())
    elif entry.flags == SKIP:
        partition.skip(entry.session, entry.number)
    elif partition.check(entry, finite_only=False) is Status.OK:
        partition.take(partition.push_from(entry), keep, stand_in)
    else:
        return False
    return True


def _answer_to(entry: Entry, verdict: Verdict) -> Entry:
    taken = verdict in (Verdict.TAKE, Verdict.KNOWN)
    status = Status.OK if taken else Status.UNKNOWN
    return Entry(entry.table, entry.part, version=entry.version, status=status)


def _first_of(entries: list[Entry]) -> list[Entry]:
    """Return as many as fit well into one message."""
    batch: list[Entry] = []
    size = 0
    for entry in entries[: MAX_ENTRIES - 1]:
        size += 0 if entry.values is None else entry.values.nbytes
        if batch and size > MESSAGE_BYTES:
            break
        batch.append(entry)
    return batch
