"""The workers' clocks, and the questions that a consistency model answers about them.

A worker's clock is the number of clocks that it has finished. The same small state machine runs at
each server, fed with events: join, leave, die, clock. Those who left or died are not waited for, so
no order of such events can hold the others up for ever. Pure: no time, no network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Consistency(ABC):
    """What a worker may read, given how far the slowest one is."""

    # Whether the pushes of a clock are added up, in the order of the workers, and applied once
    # when everyone has finished the clock.
    aggregates = False
    # Whether the last push of a worker that is not waited for counts again where it has none.
    stands_in = False
    # Whether a worker is ever made to wait for a slower one.
    waits = True
    # Whether clients keep what they have read, to read it again.
    caches = False

    @abstractmethod
    def may_read(self, clock: int, slowest: int) -> bool:
        """Whether a worker that has finished `clock` clocks may read now."""

    def may_reuse(self, stamp: int, clock: int) -> bool:
        """Whether what was read when the slowest was at `stamp` will still do, unread."""
        return False

    def may_go_on(self, stamp: int, clock: int) -> bool:
        """The same, while the next read is under way."""
        return self.may_reuse(stamp, clock)


class Clocks:
    """One server's knowledge of the workers."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._awaited: frozenset[int] = frozenset()
        self._excused: frozenset[int] = frozenset()
        self._started = True
        self._highest_slowest = 0

    @property
    def workers(self) -> frozenset[int]:
        return frozenset(self._clocks)

    @property
    def slowest(self) -> int:
        """The clock that everyone who is waited for has finished. Never goes back."""
        return self._highest_slowest

    def clock_of(self, worker: int) -> int | None:
        return self._clocks.get(worker)

    def all_have_finished(self, clock: int) -> bool:
        """Also those who are not waited for. It stays so: who joins stands beside the slowest."""
        return self._highest_slowest >= clock <= min(self._clocks.values(), default=clock)

    def expect(self, workers: Iterable[int], started: bool = True) -> None:
        """These are in the group: nothing moves on before all of them were heard of here.

        Nor before the group has `started`: until then others may come who begin at clock 0.
        """
        self._awaited, self._started = frozenset(workers), started
        self._update()

    def excuse(self, workers: Iterable[int]) -> None:
        """Don't wait for these. One that is waited for again stands beside the slowest."""
        before, self._excused = self._excused, frozenset(workers)
        self._update()
        for worker in before - self._excused:
            if worker in self._clocks:
                self._clocks[worker] = max(self._clocks[worker], self._highest_slowest)

    def join(self, worker: int) -> int:
        """A worker comes, or comes back: it stands beside the slowest. Returns its clock."""
        self._clocks[worker] = self._highest_slowest
        return self._highest_slowest

    def finish(self, worker: int, clock: int) -> None:
        """A worker has finished `clock` clocks; news that are older than known are ignored."""
        if worker not in self._clocks:
            self.join(worker)
        self._clocks[worker] = max(self._clocks[worker], clock)
        self._update()

    def leave(self, worker: int) -> None:
        """In good order: what it has finished counts."""
        last = self._clocks.pop(worker, None)
        self._awaited -= {worker}
        self._update(last)

    def die(self, worker: int) -> None:
        """What it pushed stays, but nobody waits for the rest of its clock."""
        last = self._clocks.pop(worker, None)
        self._awaited -= {worker}
        # The last one to go may have pushed in a clock that it didn't finish.
        self._update(None if last is None else last + 1)

    def _update(self, last: int | None = None) -> None:
        """`last` counts where nobody is left."""
        if not self._started or not self._awaited <= self._clocks.keys():
            return
        waited_for = [c for worker, c in self._clocks.items() if worker not in self._excused]
        slowest = min(waited_for or self._clocks.values(), default=last)
        if slowest is not None:
            self._highest_slowest = max(self._highest_slowest, slowest)
