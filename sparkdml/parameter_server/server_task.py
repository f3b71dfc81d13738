"""The Spark task of a server, for one run or for a group of servers.

For one run it serves until the driver ends the run, and reports its counts. For a group it runs a
server for each application, on a thread each. Applications share nothing but the process: each has
its own address and key, tables, clocks and consistency model, and a failure ends only its own
application.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdml.parameter_server.application import ASK, FAILED, WHICH, config_from, secret_of
from sparkdml.parameter_server.client.base import Ask
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.server.node import ServerNode, ServerThread, serve

if TYPE_CHECKING:
    from sparkdml.runtime.worker.context import Context


REPORT_SECONDS = 2.0


def serve_until_the_end(ctx: Context, config: ServerConfig) -> None:
    reporter = Reporter(ctx)

    def ask(what: str, **fields: Any) -> Any:
        reporter.report_periodically()
        if ctx.wait_for_the_end(0):
            return {"stop": True}  # the workers' job is done, or the driver is gone
        return ctx.ask(what, **fields)

    serve(ctx.rank, config, ask, ctx.host, on_start=reporter.watch)
    reporter.tell()  # the final counts: the driver listens until this task is done


class Reporter:
    """Sends a server's counts as events, if they have changed. Called with each beat."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._node: ServerNode | None = None
        self._reported: dict[str, Any] = {}
        self._reported_at = time.monotonic()

    def watch(self, node: ServerNode) -> None:
        """A server that was declared dead starts again, with new counters."""
        self.tell()
        self._node, self._reported = node, node.stats.to_dict()

    def report_periodically(self) -> None:
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self.tell()

    def tell(self) -> None:
        if self._node is None:
            return
        self._reported_at = time.monotonic()
        counts = self._node.stats.to_dict()
        if counts != self._reported:
            self._reported = counts
            self._ctx.event("server", seat=self._node.server_id, **counts)


LOOK_SECONDS = 0.1  # between two looks for applications that have come or gone


def host_servers(ctx: Context) -> bool:
    """Until the group is closed; a restarted task serves all applications again."""
    hosted: dict[int, ServerThread] = {}
    try:
        while not ctx.wait_for_the_end(LOOK_SECONDS):
            known = ctx.ask(WHICH)
            if known is None:
                continue  # the driver is busy, or gone: then the wait is over soon
            if known["over"]:
                break
            wanted = dict(known["applications"])
            for number in [number for number in hosted if number not in wanted]:
                hosted.pop(number).stop()
            for number, description in wanted.items():
                if number not in hosted:
                    hosted[number] = _host(ctx, number, description)
                elif not hosted[number].is_alive():
                    _report_failure(ctx, number, hosted[number])
    finally:
        for thread in hosted.values():
            thread.ask_to_stop()
        for thread in hosted.values():
            thread.stop()
    return True


def _host(ctx: Context, number: int, description: Mapping[str, Any]) -> ServerThread:
    config = config_from(description, secret_of(ctx.plan.secret, number))
    thread = ServerThread(ctx.rank, config, _ask_of(ctx, number), ctx.host)
    thread.start()
    return thread


def _report_failure(ctx: Context, number: int, thread: ServerThread) -> None:
    """Once: what has ended is not started again, as what it held is gone."""
    error, thread.error = thread.error, None
    if error is not None:
        ctx.ask(FAILED, application=number, why=repr(error))


def _ask_of(ctx: Context, number: int) -> Ask:
    def ask(what: str, **fields: Any) -> Any:
        if ctx.wait_for_the_end(0):
            return {"stop": True}
        return ctx.ask(ASK, application=number, question=what, fields=fields)

    return ask
