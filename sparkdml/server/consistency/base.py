"""The workers' clocks, and the questions that a consistency model answers about them.

A worker's clock is the number of clocks that it has finished. The same small state machine runs at
each server, fed with events: join, leave, die, clock. Those who left or died are not waited for, so
no order of such events can hold the others up for ever. Pure: no time, no network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Consistency(ABC):
    """What a worker may read, given how far the slowest one is."""

    # Whether the pushes of a clock are added up, in the order of the workers, and applied once
    # when everyone has finished the clock.
    aggregates = False

    @abstractmethod
    def may_read(self, clock: int, slowest: int) -> bool:
        """Whether a worker that has finished `clock` clocks may read now."""

    def may_reuse(self, stamp: int, clock: int) -> bool:
        """Whether what was read when the slowest was at `stamp` will still do, unread."""
        return False


class Clocks:
    """One server's knowledge of the workers."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._highest_slowest = 0

    @property
    def workers(self) -> frozenset[int]:
        return frozenset(self._clocks)

    @property
    def slowest(self) -> int:
        """The clock that everyone who is waited for has finished. Never goes back.

        Without workers there is nobody to wait for: then it is the highest clock that was seen.
        """
        return self._highest_slowest

    def clock_of(self, worker: int) -> int | None:
        return self._clocks.get(worker)

    def join(self, worker: int) -> int:
        """A worker comes, or comes back: it stands beside the slowest. Returns its clock."""
        self._clocks[worker] = self._highest_slowest
        return self._highest_slowest

    def finish(self, worker: int, clock: int) -> None:
        """A worker has finished `clock` clocks; news that are older than known are ignored."""
        if worker not in self._clocks:
            self.join(worker)
        self._clocks[worker] = max(self._clocks[worker], clock)
        self._update(self._clocks.values())

    def leave(self, worker: int) -> None:
        """In good order: what it has finished counts."""
        last = self._clocks.pop(worker, None)
        if last is not None:
            self._update(self._clocks.values() or [last])

    def die(self, worker: int) -> None:
        """What it pushed stays, but nobody waits for the rest of its clock."""
        last = self._clocks.pop(worker, None)
        if last is not None:
            # The last one to go may have pushed in a clock that it didn't finish.
            self._update(self._clocks.values() or [last + 1])

    def _update(self, clocks: object) -> None:
        self._highest_slowest = max(self._highest_slowest, min(clocks))  # type: ignore[call-overload]
