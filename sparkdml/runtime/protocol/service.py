"""The desk: a strategy's own part at the driver, for what only one place can keep.

Who is there, who serves what, who has which piece of the data: tasks ask by
`ctx.ask("lease", shard=3)`. In `dml.run`, a function object with a method `desk(num_workers)` has
one too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sparkdml.runtime.protocol.connection import Message


@dataclass(frozen=True)
class Peer:
    """A task of the run, as the desk knows it."""

    role: str
    rank: int  # among the tasks of its role
    attempt: int  # how often Spark has started it before
    host: str


class Desk(Protocol):
    """Lives as long as a submission. Called from several threads; answers without waiting."""

    def answer(self, peer: Peer, about: str, fields: Message) -> Any:
        """What a task asked, as JSON; a task that waits for something asks again."""
        ...

    def came(self, peer: Peer) -> None:
        """A task has started, perhaps once more."""
        ...

    def went(self, peer: Peer, outcome: str) -> None:
        """A task has ended: "done", "failed" (it reported an error), or "lost" (it did not)."""
        ...


@runtime_checkable
class GuestDesk(Desk, Protocol):
    """A desk that shares a secret with somebody outside of the run, and is closed with it."""

    secret: bytes  # becomes the run's own, which its tasks know

    def close(self) -> None:
        """The submission is over."""
        ...
