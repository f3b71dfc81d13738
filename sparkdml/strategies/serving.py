"""A server's task: it serves until the driver ends the run, and tells what it counts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sparkdml.server.config import ServerConfig
from sparkdml.server.node import ServerNode, serve

if TYPE_CHECKING:
    from sparkdml.runtime.context import Context

TELL_SECONDS = 2.0


def serve_until_the_end(ctx: Context, config: ServerConfig) -> None:
    teller = Teller(ctx)

    def ask(what: str, **fields: Any) -> Any:
        teller.tell_now_and_then()
        if ctx.wait_for_the_end(0):
            return {"stop": True}  # the workers' job is done, or the driver is gone
        return ctx.ask(what, **fields)

    serve(ctx.rank, config, ask, ctx.host, on_start=teller.watch)
    teller.tell()  # the last words: the driver listens until this task is done


class Teller:
    """Sends a server's counts as events, if they have changed. Called with each beat."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._node: ServerNode | None = None
        self._told: dict[str, Any] = {}
        self._told_at = time.monotonic()

    def watch(self, node: ServerNode) -> None:
        """A server that was taken for dead starts anew, and so do its counts."""
        self.tell()
        self._node, self._told = node, node.stats.to_dict()

    def tell_now_and_then(self) -> None:
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        if self._node is None:
            return
        self._told_at = time.monotonic()
        counts = self._node.stats.to_dict()
        if counts != self._told:
            self._told = counts
            self._ctx.event("server", seat=self._node.seat, **counts)
