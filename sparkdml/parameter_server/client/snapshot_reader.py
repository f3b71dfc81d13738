"""A client that reads tables as they were after a clock, without delaying the workers.

It is not a worker: it has no clock, sends no heartbeats, and may start and stop at any time.
What is read is consistent over all servers; what that means is in `clock_copies.py`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import zmq
from torch import Tensor

from sparkdml.network.timeouts import SNAPSHOT_ANSWER_SECONDS
from sparkdml.parameter_server.client.base import Ask
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.partition import Key, Table
from sparkdml.parameter_server.view import View
from sparkdml.parameter_server.wire.frames import AT_CLOCK, FETCH, Entry, Kind, Message, Status
from sparkdml.parameter_server.wire.sockets import Outbox, Watcher, new_number

if TYPE_CHECKING:
    from typing_extensions import Self

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.005, 0.1
STANDSTILL_SECONDS = 0.5  # without a clock, after which the present one will do
PARTS_AT_ONCE = 16
ENTRIES_AT_ONCE = 1024


@dataclass(frozen=True)
class Snapshot:
    """Tables that have, of every worker, the pushes of its first `clock` clocks and no others.

    Of workers that had left by then, they have all pushes.
    """

    clock: int
    tables: dict[str, Tensor]


class SnapshotReader:
    """Used by one thread."""

    def __init__(self, config: ServerConfig, ask: Ask) -> None:
        self._key, self._ask = config.key, ask
        self._own, self._view = new_number(), View()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._watcher = Watcher()
        self._outboxes: dict[int, Outbox] = {}  # by server
        self.dropped: Counter[str] = Counter()

    def snapshot(self, tables: Sequence[Table], goes_on: Callable[[], bool]) -> Snapshot | None:
        """Return all of these tables after one clock, or None once `goes_on` returns False.

        Waits for tables that don't exist yet.
        """
        keys = [table.key(part) for table in tables for part in range(table.num_parts)]
        clock, margin, pause = 0, 0, FIRST_PAUSE_SECONDS
        seen, seen_at = -1, time.monotonic()
        while goes_on():
            answers = self._ask_for(keys, clock, AT_CLOCK)
            found = {answer.status for answer in answers.values()}
            lowest = max((answer.clock for answer in answers.values()), default=0)
            if len(answers) < len(keys) or found & {Status.MOVED, Status.UNKNOWN}:
                self._find_servers()
            elif Status.LATE in found:
                # The workers are ahead: choose a clock that they can't reach meanwhile.
                clock, margin, pause = lowest + margin, 2 * margin or 1, FIRST_PAUSE_SECONDS
                continue
            elif found == {Status.OK}:
                fetched = self._fetch(tables, clock)
                if fetched is not None:
                    return Snapshot(clock, fetched)
            elif lowest != seen:
                seen, seen_at = lowest, time.monotonic()
            elif lowest < clock and time.monotonic() - seen_at > STANDSTILL_SECONDS:
                clock = lowest  # no worker is on its way to the chosen clock
                continue
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return None

    def close(self) -> None:
        for server_id in list(self._outboxes):
            self._disconnect(server_id)
        self._watcher.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the servers ------------------------------------------------------------------------------

    def _find_servers(self) -> None:
        answer = self._ask(
            "server.view", generation=self._view.generation, roster=self._view.roster
        )
        if answer is None or "view" not in answer:
            return
        old, self._view = self._view, View.from_dict(answer["view"])
        for server_id in list(self._outboxes):
            if self._view.servers.get(server_id) != old.servers.get(server_id):
                self._disconnect(server_id)
        for server_id, member in self._view.servers.items():
            if server_id not in self._outboxes:
                self._outboxes[server_id] = Outbox(
                    self._context,
                    member.address,
                    own=self._own,
                    server=member.number,
                    key=self._key,
                    dropped=self.dropped,
                )
                self._watcher.add(self._outboxes[server_id].socket)

    def _disconnect(self, server_id: int) -> None:
        outbox = self._outboxes.pop(server_id)
        self._watcher.remove(outbox.socket)
        outbox.close()

    def _fetch(self, tables: Sequence[Table], clock: int) -> dict[str, Tensor] | None:
        """Return the copies, which are ready; None if one of them no longer exists.

        Copies of different rosters of workers don't belong together.
        """
        found: dict[str, Tensor] = {}
        rosters: set[int] = set()
        for table in tables:
            matrix = torch.empty((table.num_rows, table.width), dtype=table.dtype)
            parts = iter(range(table.num_parts))
            while batch := list(islice(parts, PARTS_AT_ONCE)):
                keys = [table.key(part) for part in batch]
                answers = self._ask_for(keys, clock, AT_CLOCK | FETCH, entries_at_once=1)
                for part in batch:
                    answer = answers.get(table.key(part))
                    if answer is None or answer.values is None:
                        return None
                    rosters.add(answer.generation)
                    start, stop = table.range(part)
                    matrix[start:stop].copy_(answer.values.view(stop - start, table.width))
            found[table.name] = matrix.reshape(table.shape)
        return found if len(rosters) == 1 else None

    def _ask_for(
        self, keys: Iterable[Key], clock: int, flags: int, entries_at_once: int = ENTRIES_AT_ONCE
    ) -> dict[Key, Entry]:
        """Return the servers' answers for these parts, without those that don't answer."""
        if not self._view.servers:
            return {}
        by_server: defaultdict[int, list[Key]] = defaultdict(list)
        for key in keys:
            by_server[self._view.primary(key)].append(key)
        awaited: set[tuple[int, int]] = set()  # the server, and the number of the message
        for server_id, of_server in by_server.items():
            for start in range(0, len(of_server), entries_at_once):
                entries = [Entry(*key) for key in of_server[start : start + entries_at_once]]
                message = Message(
                    Kind.PULL,
                    entries,
                    clock=clock,
                    flags=flags,
                    generation=self._view.generation,
                    roster=self._view.roster,
                )
                awaited.add((server_id, self._outboxes[server_id].send(message)))
        return self._gather(awaited)

    def _gather(self, awaited: set[tuple[int, int]]) -> dict[Key, Entry]:
        found: dict[Key, Entry] = {}
        deadline = time.monotonic() + SNAPSHOT_ANSWER_SECONDS
        while awaited and (left := deadline - time.monotonic()) > 0:
            ready = self._watcher.wait(max(1, int(1000 * left)))
            for server_id, outbox in self._outboxes.items():
                while outbox.socket in ready and (message := outbox.receive()) is not None:
                    if (server_id, message.answers) in awaited:  # else it came too late
                        awaited.discard((server_id, message.answers))
                        found.update({entry.key: entry for entry in message.entries})
        return found
