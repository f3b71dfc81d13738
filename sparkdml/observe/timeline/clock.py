"""Puts a worker's times on the driver's clock.

As NTP does: ask for the time, take the middle between question and answer, and believe the quickest
of several round trips, whose error is at most half of its duration. (Cristian 1989, "Probabilistic
clock synchronization".) Clocks drift apart by some parts in a million, which is several steps in an
hour, so this is repeated; a correction is then spread over time, lest a span begin before the one
that came before it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

ROUND_TRIPS = 8
SPREAD_NS = 10_000_000_000  # over which a correction is spread
MAX_KNOTS = 64

AskTime = Callable[[], float | None]  # the driver's time.time(), or None where nobody answers


class AlignedClock:
    """From this process's `perf_counter_ns` to nanoseconds since 1970 by the driver's clock."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        # The offset as a line between knots: (perf_counter_ns, offset).
        self._knots: list[tuple[int, int]] = []
        self.uncertainty_ns: int | None = None  # None: not aligned, the worker's own clock

    @property
    def is_aligned(self) -> bool:
        return self.uncertainty_ns is not None

    def align(self, ask: AskTime, round_trips: int = ROUND_TRIPS) -> None:
        """Ask the driver, and go by its clock from now on."""
        measured = measure_offset(ask, self._now, round_trips)
        now = self._now()
        if measured is None:
            if not self._knots:  # the driver will shift these by when they arrive
                self._knots = [(now, time.time_ns() - now)]
            return
        offset, uncertainty = measured
        if not self.is_aligned:
            self._knots = [(now, offset)]
        elif abs(offset - self.offset_at(now)) > uncertainty:
            before = [knot for knot in self._knots if knot[0] < now]
            corrected = (now + SPREAD_NS, offset)
            self._knots = [*before[-MAX_KNOTS:], (now, self.offset_at(now)), corrected]
        self.uncertainty_ns = uncertainty

    def offset_at(self, moment: int) -> int:
        place = bisect_right(self._knots, (moment, 1 << 63))
        if place == 0:
            return self._knots[0][1]
        if place == len(self._knots):
            return self._knots[-1][1]
        (start, before), (end, after) = self._knots[place - 1], self._knots[place]
        return before + (after - before) * (moment - start) // (end - start)

    def to_driver(self, moment: int) -> int:
        return moment + self.offset_at(moment)


def measure_offset(
    ask: AskTime, now: Callable[[], int], round_trips: int
) -> tuple[int, int] | None:
    """The offset of the quickest round trip and its uncertainty; None if there was no answer."""
    best: tuple[int, int] | None = None
    for _ in range(round_trips):
        sent = now()
        answer = ask()
        received = now()
        if answer is None:
            break  # it is gone, or has better things to do: don't wait for it again and again
        uncertainty = (received - sent) // 2
        if best is None or uncertainty < best[1]:
            best = (int(answer * 1e9) - (sent + received) // 2, uncertainty)
    return best
