"""Expulsion: a worker that stays far slower than the others is not waited for until it recovers.

The rule looks at the seconds that each worker computes in a clock, not counting its waits. One that
needs more than `slower_than` times the others' median in `after_clocks` consecutive clocks is
expelled: the others no longer wait for it, while its pushes count as they arrive. After
`readmit_after` consecutive clocks within the bound it is waited for again. At most half of the
workers are expelled. Pure; kept at the driver, so that all servers expel the same ones.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from sparkdml.errors import ParameterError


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
