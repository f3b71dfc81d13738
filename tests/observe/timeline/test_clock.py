"""A worker's times by the driver's clock."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.observe.timeline.recorder import SPREAD_NS, AlignedClock

AHEAD_NS = 1_700_000_000_000_000_000


class Worlds:
    """A worker's counter and a driver's clock that is ahead, and runs at another rate."""

    def __init__(self, seed: int = 0, drift: float = 0.0) -> None:
        self.now = 5_000_000_000
        self.random = random.Random(seed)
        self.drift = drift

    def counter(self) -> int:
        return self.now

    def driver(self, moment: int) -> float:
        return moment * (1 + self.drift) + AHEAD_NS

    def ask(self) -> float:
        self.now += self.random.randint(10_000, 2_000_000)  # there, slower than back
        answer = self.driver(self.now) / 1e9
        self.now += self.random.randint(10_000, 500_000)
        return answer


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_the_error_is_within_the_uncertainty(seed: int) -> None:
    worlds = Worlds(seed)
    clock = AlignedClock(worlds.counter)
    clock.align(worlds.ask)
    assert clock.uncertainty_ns is not None
    assert clock.uncertainty_ns < 1_250_000
    error = abs(clock.to_driver(worlds.now) - worlds.driver(worlds.now))
    assert error <= clock.uncertainty_ns + 500  # a float of seconds holds a quarter microsecond


def test_drift_is_followed_and_time_never_runs_backwards() -> None:
    worlds = Worlds(drift=-200e-6)  # after a minute 12 ms behind
    clock = AlignedClock(worlds.counter)
    times, without = [], 0.0
    for _ in range(20):
        clock.align(worlds.ask)
        without = without or clock.to_driver(worlds.now) - worlds.driver(worlds.now)
        for _ in range(30):
            worlds.now += 1_000_000_000
            times.append(clock.to_driver(worlds.now))
    assert times == sorted(times)
    error = abs(clock.to_driver(worlds.now) - worlds.driver(worlds.now))
    assert error < 30 * 1e9 * 200e-6 + 3e6, "one interval's drift, not that of twenty"


def test_a_correction_is_spread() -> None:
    worlds = Worlds()
    clock = AlignedClock(worlds.counter)
    clock.align(worlds.ask)
    before = clock.offset_at(worlds.now)
    clock.align(lambda: worlds.ask() + 1.0)
    now = worlds.now
    assert clock.offset_at(now) == before
    assert 0.4e9 < clock.offset_at(now + SPREAD_NS // 2) - before < 0.6e9
    assert 0.99e9 < clock.offset_at(now + 2 * SPREAD_NS) - before < 1.01e9
    assert clock.offset_at(now - 1000) == before, "what was measured before stays where it was"


def test_a_driver_that_does_not_answer_is_tried_again() -> None:
    worlds = Worlds()
    clock = AlignedClock(worlds.counter)
    clock.align(lambda: None)
    assert not clock.is_aligned
    clock.to_driver(worlds.now)  # by the worker's own clock
    clock.align(worlds.ask)
    assert clock.is_aligned
    assert abs(clock.to_driver(worlds.now) - worlds.driver(worlds.now)) < 2e6
