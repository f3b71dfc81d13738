"""A server group on threads of this process: what its tasks do in Spark, without Spark."""

from __future__ import annotations

import threading
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, cast

from sparkdml.runtime.context import Context
from sparkdml.runtime.desk import Peer
from sparkdml.serving.applications import Applications
from sparkdml.serving.hosting import host_servers

if TYPE_CHECKING:
    from typing_extensions import Self

JOIN_SECONDS = 20.0


class ThreadedGroup:
    """As `ServerGroup`, as far as a strategy sees it."""

    def __init__(self, num_servers: int = 2) -> None:
        self.num_servers = num_servers
        self.applications = Applications(num_servers, b"of one group on threads")
        self._tasks: dict[int, _Task] = {}

    def start_server(self, rank: int, attempt: int = 0) -> None:
        self._tasks[rank] = _Task(self.applications, Peer("server", rank, attempt, "127.0.0.1"))

    def lose_server(self, rank: int) -> None:
        """End one with all that it holds; the desk is told, as it would be of a lost task."""
        self._tasks.pop(rank).end("lost")

    def __enter__(self) -> Self:
        for rank in range(self.num_servers):
            self.start_server(rank)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.applications.end("the server group was closed")
        for task in self._tasks.values():
            task.end("done")


class _Task:
    """One attempt at one of the group's tasks."""

    def __init__(self, desk: Applications, peer: Peer) -> None:
        self._desk, self._peer, self._over = desk, peer, threading.Event()
        desk.came(peer)
        context = SimpleNamespace(
            rank=peer.rank,
            host=peer.host,
            plan=SimpleNamespace(secret=desk.secret),
            ask=self._ask,
            wait_for_the_end=self._over.wait,
        )
        self._thread = threading.Thread(
            target=host_servers, args=(cast(Context, context),), name="sparkdml-task", daemon=True
        )
        self._thread.start()

    def _ask(self, what: str, **fields: Any) -> Any:
        return self._desk.answer(self._peer, what, fields)

    def end(self, outcome: str) -> None:
        self._over.set()
        self._thread.join(JOIN_SECONDS)
        self._desk.went(self._peer, outcome)
