"""A server on a thread of its own, in a process that does other things as well."""

from __future__ import annotations

import threading

from sparkdml.server.base import Ask
from sparkdml.server.config import ServerConfig
from sparkdml.server.node import ServerNode, serve

JOIN_SECONDS = 10.0


class ServerThread(threading.Thread):
    """Started once. `error` is what ended it, if it was not told to stop."""

    def __init__(self, seat: int, config: ServerConfig, ask: Ask, host: str) -> None:
        super().__init__(name=f"sparkdml-server-{seat}", daemon=True)
        self._arguments = seat, config, ask, host
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
        self.join(JOIN_SECONDS)

    def ask_to_stop(self) -> None:
        with self._lock:
            self._stopping = True
            if self._node is not None:
                self._node.stop()
