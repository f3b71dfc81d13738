"""The workers' clocks, the consistency models, which decide what a worker may read, and expulsion.

A worker's clock is the number of clocks that it has finished. The same small state machine runs at
each server, fed with events: join, leave, die, clock. Workers that left or died are not waited for,
so no order of such events can block the others indefinitely. Pure: no time, no network.

- `BSP`, bulk-synchronous (Valiant 1990): all workers wait for each other. The pushes of a clock are
  added up with their weights, in the order of the workers, and applied as one: the result equals
  synchronous SGD on the combined batch, and two runs give the same bits.
- `SSP`, stale-synchronous (Ho et al. 2013, NIPS): no worker runs more than s clocks ahead of the
  slowest. A worker that has finished c clocks reads a model with all updates of the clocks before
  c - s, of every worker, and its own of all clocks (read-my-writes); it may contain later ones. So
  a value that was read while the slowest had finished m clocks may be read again, without the
  servers, as long as m >= c - s. The same bound holds if each worker updates a part of the model.
- `TAP`, totally asynchronous (Niu et al. 2011; Dean et al. 2012): no worker ever waits.
- `ASP`, approximate-synchronous (Gaia, Hsieh et al. 2017, NSDI): only significant updates are sent.
  A worker adds up its updates of each row, and pushes the sum once it is larger than `significance`
  of the row's own size; until then it is held back, indefinitely if it stays small. Updates shrink
  as training converges, and so may the threshold: significance / sqrt(1 + decay * clock).

With `Expulsion`, a worker that stays far slower than the others is not waited for until it
recovers. The rule looks at the seconds that each worker computes in a clock, not counting its
waits. One that needs more than `slower_than` times the others' median in `after_clocks` consecutive
clocks is expelled: the others no longer wait for it, while its pushes count as they arrive. After
`readmit_after` consecutive clocks within the bound it is waited for again. At most half of the
workers are expelled. The rule is kept at the driver, so that all servers expel the same ones.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sparkdml.errors import ParameterError


@dataclass(frozen=True)
class Consistency(ABC):
    """Decides what a worker may read, given how far the slowest one is."""

    # Whether the pushes of a clock are added up, in the order of the workers, and applied once
    # when all workers have finished the clock.
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
        """Whether it may be used again while the next read is under way."""
        return self.may_reuse(stamp, clock)


class Clocks:
    """One server's knowledge of the workers."""

    def __init__(self) -> None:
        self._clocks: dict[int, int] = {}
        self._awaited: frozenset[int] = frozenset()
        self._expelled: frozenset[int] = frozenset()
        self._started = True
        self._highest_slowest = 0

    @property
    def workers(self) -> frozenset[int]:
        return frozenset(self._clocks)

    @property
    def slowest(self) -> int:
        """The clock that all workers that are waited for have finished. It never decreases."""
        return self._highest_slowest

    def clock_of(self, worker: int) -> int | None:
        return self._clocks.get(worker)

    def all_have_finished(self, clock: int) -> bool:
        """Whether all have, expelled workers too. It stays true: workers join at the slowest."""
        return self._highest_slowest >= clock <= min(self._clocks.values(), default=clock)

    def expect(self, workers: Iterable[int], started: bool = True) -> None:
        """Set the group's workers: no clock advances before all of them were heard of here.

        Nor before the group has `started`: until then, other workers may join at clock 0.
        """
        self._awaited, self._started = frozenset(workers), started
        self._update()

    def expel(self, workers: Iterable[int]) -> None:
        """Don't wait for these. A readmitted worker continues at the slowest worker's clock."""
        before, self._expelled = self._expelled, frozenset(workers)
        self._update()
        for worker in before - self._expelled:
            if worker in self._clocks:
                self._clocks[worker] = max(self._clocks[worker], self._highest_slowest)

    def join(self, worker: int) -> int:
        """Let a worker join or rejoin, at the slowest worker's clock, which is returned."""
        self._clocks[worker] = self._highest_slowest
        return self._highest_slowest

    def finish(self, worker: int, clock: int) -> None:
        """Record that a worker has finished `clock` clocks; outdated reports are ignored."""
        if worker not in self._clocks:
            self.join(worker)
        self._clocks[worker] = max(self._clocks[worker], clock)
        self._update()

    def leave(self, worker: int) -> None:
        """Let a worker leave in an orderly way: what it has finished counts."""
        last = self._clocks.pop(worker, None)
        self._awaited -= {worker}
        self._update(last)

    def die(self, worker: int) -> None:
        """Record a death: what was pushed counts, and the rest of its clock is not waited for."""
        last = self._clocks.pop(worker, None)
        self._awaited -= {worker}
        # The last one to leave may have pushed in a clock that it didn't finish.
        self._update(None if last is None else last + 1)

    def _update(self, last: int | None = None) -> None:
        """Advance to the lowest clock, or to `last` if no worker is left."""
        if not self._started or not self._awaited <= self._clocks.keys():
            return
        waited_for = [c for worker, c in self._clocks.items() if worker not in self._expelled]
        slowest = min(waited_for or self._clocks.values(), default=last)
        if slowest is not None:
            self._highest_slowest = max(self._highest_slowest, slowest)


@dataclass(frozen=True)
class BSP(Consistency):
    """Read the model after all pushes of all workers' last clock, and none of the next.

    Args:
        stand_in: whether the last gradient of an expelled worker (see `Expulsion`) is used again in
            place of the missing one. The gradient that it sends later, too late for its own clock,
            is added to the next step and replaces the stand-in there.
    """

    aggregates = True
    stand_in: bool = False

    @property
    def stands_in(self) -> bool:  # type: ignore[override]
        return self.stand_in

    def may_read(self, clock: int, slowest: int) -> bool:
        return slowest >= clock


@dataclass(frozen=True)
class SSP(Consistency):
    caches = True
    staleness: int = 3

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ParameterError("staleness", self.staleness, "at least 0")

    def may_read(self, clock: int, slowest: int) -> bool:
        return slowest >= clock - self.staleness

    def may_reuse(self, stamp: int, clock: int) -> bool:
        return stamp >= clock - self.staleness


@dataclass(frozen=True)
class TAP(Consistency):
    waits = False

    def may_read(self, clock: int, slowest: int) -> bool:
        return True

    def may_go_on(self, stamp: int, clock: int) -> bool:
        return True


@dataclass(frozen=True)
class ASP(Consistency):
    waits = False
    significance: float = 0.01
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.significance >= 0:
            raise ParameterError("significance", self.significance, "at least 0")
        if not self.decay >= 0:
            raise ParameterError("decay", self.decay, "at least 0")

    def may_read(self, clock: int, slowest: int) -> bool:
        return True

    def may_go_on(self, stamp: int, clock: int) -> bool:
        return True

    def threshold(self, clock: int) -> float:
        return self.significance / math.sqrt(1 + self.decay * clock)


@dataclass(frozen=True)
class Expulsion:
    """When a worker is too slow to be waited for, and when it is waited for again.

    Its pushes still count. Each epoch begins with all workers.

    Args:
        slower_than: a multiple of the others' median computing time in a clock.
        after_clocks: for how many consecutive clocks a worker must be slower than that.
        readmit_after: for how many consecutive clocks it must then keep up.
    """

    slower_than: float = 4.0
    after_clocks: int = 3
    readmit_after: int = 3

    def __post_init__(self) -> None:
        if not self.slower_than > 1:
            raise ParameterError("slower_than", self.slower_than, "more than 1")
        for name in ("after_clocks", "readmit_after"):
            if getattr(self, name) < 1:
                raise ParameterError(name, getattr(self, name), "at least 1")


class Watch:
    """The rule at work."""

    def __init__(self, rule: Expulsion) -> None:
        self._rule = rule
        self._seconds: dict[int, float] = {}
        self._slow: Counter[int] = Counter()  # consecutive clocks
        self._well: Counter[int] = Counter()
        self.expelled: frozenset[int] = frozenset()

    def finished(self, worker: int, seconds: float) -> None:
        """Record the seconds that a worker computed for a clock."""
        self._seconds[worker] = seconds
        others = [value for other, value in self._seconds.items() if other != worker]
        if not others:
            return
        if seconds > self._rule.slower_than * statistics.median(others):
            self._slow[worker] += 1
            self._well[worker] = 0
        else:
            self._well[worker] += 1
            self._slow[worker] = 0
        enough_left = 2 * (len(self.expelled) + 1) <= len(self._seconds)
        if self._well[worker] >= self._rule.readmit_after:
            self.expelled -= {worker}
        elif self._slow[worker] >= self._rule.after_clocks and enough_left:
            self.expelled |= {worker}

    def gone(self, worker: int) -> None:
        self._seconds.pop(worker, None)
        self._slow.pop(worker, None)
        self._well.pop(worker, None)
        self.expelled -= {worker}
