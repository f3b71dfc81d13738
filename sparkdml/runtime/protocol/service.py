"""A strategy's driver-side service, for state that only one process can keep.

Membership, placement, which worker has which part of the data: tasks ask for it with
`ctx.ask("lease", shard=3)`, and the driver answers on the control server's threads. In `dml.run`, a
function object with a method `driver_service(num_workers)` has one too. A service lives as long as
a submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sparkdml.network.connection import Message
from sparkdml.network.timeouts import Timeouts


@dataclass(frozen=True)
class TaskIdentity:
    """A task of the run, as a driver service sees it."""

    role: str
    rank: int  # among the tasks of its role
    attempt: int  # how often Spark has started it before
    host: str


class DriverService(Protocol):
    """Called from several threads; answers without waiting."""

    def answer(self, peer: TaskIdentity, about: str, fields: Message) -> Any:
        """The answer to a task's question, as JSON; a task that waits for something asks again.

        A `ProtocolError` is raised in the task that asked, for a question that the service does not
        know. Any other exception ends the run.
        """
        ...

    def on_join(self, peer: TaskIdentity) -> None:
        """A task has started, perhaps once more."""
        ...

    def on_leave(self, peer: TaskIdentity, outcome: str) -> None:
        """A task has ended: "done", "failed" (it reported an error), or "lost" (it did not)."""
        ...


@runtime_checkable
class SharedService(DriverService, Protocol):
    """A service that shares a secret with a process outside of the run, and is closed with it."""

    secret: bytes  # becomes the run's own, which its tasks know

    def close(self) -> None:
        """The submission is over."""
        ...


@runtime_checkable
class TimedService(DriverService, Protocol):
    """A service that judges by itself which of the tasks are dead."""

    def use_timeouts(self, timeouts: Timeouts) -> None:
        """The run's time-outs; called once, before any task starts."""
        ...
