"""A server group on threads of this process, with the real wire on loopback."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkdml.server.client import WorkerClient
from sparkdml.server.config import ServerConfig
from sparkdml.server.membership import Membership
from sparkdml.server.node import ServerNode, serve
from sparkdml.server.seal import JobKey

if TYPE_CHECKING:
    from typing_extensions import Self


class ServerCluster:
    """Servers, and the membership that a driver would have. Other settings: of `ServerConfig`."""

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

    def start_server(self, seat: int) -> None:
        def run() -> None:
            serve(seat, self.config, self.ask, on_start=keep)

        def keep(node: ServerNode) -> None:
            self.nodes[seat] = node
            there.set()

        there = threading.Event()
        thread = threading.Thread(target=run, name=f"sparkdml-server-{seat}", daemon=True)
        self._threads[seat] = thread
        thread.start()
        there.wait(10)

    def stop_server(self, seat: int) -> None:
        """End one at once, as a crash would; the membership finds out by itself, or is told."""
        self.nodes.pop(seat).stop()
        self._threads.pop(seat).join(timeout=10)

    def client(self, worker: int = 0) -> WorkerClient:
        client = WorkerClient(worker, self.config, self.ask)
        self._clients.append(client)
        return client

    def __enter__(self) -> Self:
        for seat in range(self.config.num_servers):
            self.start_server(seat)
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
        for seat in list(self.nodes):
            self.stop_server(seat)
