"""A server group on threads of this process, with the real wire on loopback.

Its workers are threads, each with a communicator and a client of real servers; Spark is not needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sparkdml.comm.base import Communicator
from sparkdml.comm.threads import run_threads
from sparkdml.parameter_server.application import Applications
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import TAP
from sparkdml.parameter_server.kvstore.store import KVStore
from sparkdml.parameter_server.membership import Membership
from sparkdml.parameter_server.server.node import ServerNode, serve
from sparkdml.parameter_server.server_task import host_servers
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.runtime.protocol.service import TaskIdentity
from sparkdml.runtime.worker.context import Context

if TYPE_CHECKING:
    from typing_extensions import Self


class ServerCluster:
    """Servers, and the membership that a driver would have. Other settings are `ServerConfig`'s."""

    def __init__(
        self,
        num_servers: int = 2,
        num_workers: int = 1,
        encrypted: bool = False,
        **settings: Any,
    ) -> None:
        self.config = ServerConfig(
            JobKey.new(encrypted), num_servers=num_servers, num_workers=num_workers, **settings
        )
        self.membership = Membership(self.config)
        self.nodes: dict[int, ServerNode] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._clients: list[WorkerClient] = []

    def ask(self, what: str, **fields: Any) -> Any:
        return self.membership.answer(what, fields)

    def start_server(self, server_id: int) -> None:
        def run() -> None:
            serve(server_id, self.config, self.ask, on_start=keep)

        def keep(node: ServerNode) -> None:
            self.nodes[server_id] = node
            there.set()

        there = threading.Event()
        thread = threading.Thread(target=run, name=f"sparkdml-server-{server_id}", daemon=True)
        self._threads[server_id] = thread
        thread.start()
        there.wait(10)

    def stop_server(self, server_id: int) -> None:
        """End a server at once, as a crash would; the membership notices by itself, or is told."""
        self.nodes.pop(server_id).stop()
        self._threads.pop(server_id).join(timeout=10)

    def client(self, worker: int = 0) -> WorkerClient:
        client = WorkerClient(worker, self.config, self.ask)
        self._clients.append(client)
        return client

    def __enter__(self) -> Self:
        for server_id in range(self.config.num_servers):
            self.start_server(server_id)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for client in self._clients:
            client.abort()
        self.membership.stop()
        self._stop_servers()

    def _stop_servers(self) -> None:
        for server_id in list(self.nodes):
            self.stop_server(server_id)


Result = TypeVar("Result")


def run_workers(
    num_workers: int,
    fn: Callable[[Communicator, KVStore], Result],
    num_servers: int = 1,
    timeout_seconds: float = 60.0,
    **settings: Any,
) -> list[Result]:
    """Run `fn(comm, store)` in every worker; return their results in rank order.

    `settings` are those of `ServerConfig`; without a `consistency` no worker waits,
    which suits programs whose rounds synchronize them.
    """
    settings = {"consistency": TAP(), **settings}
    with ServerCluster(num_servers, num_workers, **settings) as cluster:

        def work(comm: Communicator) -> Result:
            with KVStore(cluster.client(comm.rank), num_workers) as store:
                return fn(comm, store)

        return run_threads(num_workers, work, timeout_seconds)


JOIN_SECONDS = 20.0


class ThreadedGroup:
    """A `ServerGroup`, as far as a strategy uses it."""

    def __init__(self, num_servers: int = 2) -> None:
        self.num_servers = num_servers
        self.applications = Applications(num_servers, b"of one group on threads")
        self._tasks: dict[int, _Task] = {}

    def start_server(self, rank: int, attempt: int = 0) -> None:
        self._tasks[rank] = _Task(
            self.applications, TaskIdentity("server", rank, attempt, "127.0.0.1")
        )

    def lose_server(self, rank: int) -> None:
        """End a server with all that it holds; the driver service learns of it, as of a lost
        task."""
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

    def __init__(self, driver_service: Applications, peer: TaskIdentity) -> None:
        self._service, self._peer, self._over = driver_service, peer, threading.Event()
        driver_service.on_join(peer)
        context = SimpleNamespace(
            rank=peer.rank,
            host=peer.host,
            plan=SimpleNamespace(secret=driver_service.secret),
            ask=self._ask,
            wait_for_the_end=self._over.wait,
        )
        self._thread = threading.Thread(
            target=host_servers, args=(cast(Context, context),), name="sparkdml-task", daemon=True
        )
        self._thread.start()

    def _ask(self, what: str, **fields: Any) -> Any:
        return self._service.answer(self._peer, what, fields)

    def end(self, outcome: str) -> None:
        self._over.set()
        self._thread.join(JOIN_SECONDS)
        self._service.on_leave(self._peer, outcome)
