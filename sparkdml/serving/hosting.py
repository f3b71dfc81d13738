"""What a task of a server group does: it runs a server for each application, on a thread each.

So applications share nothing but the process: each has its own address and key, its own tables and
clocks, and a consistency of its own. What goes wrong in one of them ends that one alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdml.server.base import Ask
from sparkdml.server.server_thread import ServerThread
from sparkdml.serving.application import config_from, secret_of
from sparkdml.serving.applications import ASK, FAILED, WHICH

if TYPE_CHECKING:
    from sparkdml.runtime.context import Context

LOOK_SECONDS = 0.1  # between two looks for applications that have come or gone


def host_servers(ctx: Context) -> bool:
    """Until the group is closed; a task that Spark starts again serves all applications anew."""
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
                    _tell_failure(ctx, number, hosted[number])
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


def _tell_failure(ctx: Context, number: int, thread: ServerThread) -> None:
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
