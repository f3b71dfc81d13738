"""A bounded number of trace events: whole steps at the start and the end, a sample in between."""

from __future__ import annotations

from itertools import chain
from typing import Any

StepKey = tuple[int, int]  # of which submission of the run, which step
# Sorts by begin, what encloses before what it encloses; then the event itself as JSON.
Line = tuple[float, float, str]

HEAD, TAIL, OTHERS = 0.15, 0.25, 0.25  # shares of the limit
AFTER_THINNING = 0.75


class ThinnedEvents:
    """Events of steps, which are kept or dropped as a whole; and others, dropped last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_seen = 0
        self._steps: dict[StepKey, list[Line]] = {}
        self._others: list[Line] = []
        self._marks: list[Line] = []
        self._num_kept = 0
        self._stride = 1

    @property
    def is_thinned(self) -> bool:
        return self._num_kept < self.num_seen

    def add(self, line: Line, step: StepKey | None = None, is_mark: bool = False) -> None:
        self.num_seen += 1
        self._num_kept += 1
        if is_mark:
            self._marks.append(line)
        elif step is None:
            self._others.append(line)
        else:
            self._steps.setdefault(step, []).append(line)
        if self._num_kept > self.limit:
            self._thin()

    def lines(self) -> list[Line]:
        """In the order of time."""
        if self._stride > 1:
            self._drop_steps()  # late events of dropped steps are no whole steps
        return sorted(chain(self._marks, self._others, *self._steps.values()))

    def describe(self) -> dict[str, Any]:
        """What a reader of the trace must know."""
        return {
            "thinned": self.is_thinned,
            "events": self._num_kept,
            "events dropped": self.num_seen - self._num_kept,
            "kept": "all that was recorded"
            if not self.is_thinned
            else "whole steps at the start, at the end, and in between those whose number is a "
            f"multiple of {self._stride}",
        }

    def _thin(self) -> None:
        self._others = drop_every_second(self._others, int(self.limit * OTHERS))
        self._marks = drop_every_second(self._marks, int(self.limit * OTHERS / 2))
        self._drop_steps()  # what has come since, by the stride of before
        largest = max((step for _, step in self._steps), default=0)
        while self._num_kept > self.limit * AFTER_THINNING and self._stride <= largest:
            self._stride *= 2
            self._drop_steps()

    def _drop_steps(self) -> None:
        order = sorted(self._steps)
        start = self._reach(order, int(self.limit * HEAD))
        end = self._reach(order[::-1], int(self.limit * TAIL))
        for key in order[start : max(start, len(order) - end)]:
            if key[1] % self._stride:
                del self._steps[key]
        self._count()

    def _reach(self, keys: list[StepKey], num_events: int) -> int:
        """How many of these steps have that many events in all; at least one."""
        for place, key in enumerate(keys):
            num_events -= len(self._steps[key])
            if num_events < 0:
                return max(1, place)
        return len(keys)

    def _count(self) -> None:
        steps = sum(map(len, self._steps.values()))
        self._num_kept = steps + len(self._others) + len(self._marks)


def drop_every_second(lines: list[Line], limit: int) -> list[Line]:
    """Of what lies between the first and the last quarter, until there are few enough."""
    while len(lines) > max(4, limit):
        lines.sort()
        quarter = len(lines) // 4
        middle = lines[quarter : len(lines) - quarter]
        lines = [*lines[:quarter], *middle[::2], *lines[len(lines) - quarter :]]
    return lines
