"""Where a worker's time goes: laps between the parts of a step, added up and told now and then."""

from __future__ import annotations

import time
from typing import Literal

Part = Literal["data", "compute", "communication", "checkpoint", "other"]
PARTS: tuple[Part, ...] = ("data", "compute", "communication", "checkpoint", "other")


class StepClock:
    """A stopwatch that never stops: each lap belongs to what has just been done."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._mark = time.perf_counter()

    def lap(self, part: Part) -> None:
        now = time.perf_counter()
        self._seconds[part] += now - self._mark
        self._mark = now

    def take(self) -> dict[Part, float]:
        """The seconds of each part since the last call."""
        taken = self._seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return taken
