"""The strong Wolfe line search, as a generator: it asks for samples and never evaluates anything.

All ranks drive the same search with the same numbers, so they take the same steps; the arithmetic
is plain Python, whose floats are the same on any machine. (Nocedal and Wright, Numerical
Optimization, 2nd edition, algorithms 3.5 and 3.6; near the minimum, where differences of the loss
drown in rounding, the approximate conditions of Hager and Zhang 2005, doi 10.1137/030601880.)
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

DECREASE = 1e-4  # of what the slope promises, at least
CURVATURE = 0.9  # how much of the slope may be left
WIDEN = 2.5  # the factor by which a step that is too short is extended
MARGIN = 0.1  # of an interval, from its ends: closer than this nothing is tried


@dataclass(frozen=True)
class Sample:
    """The objective along the direction: how far, how high, how steep."""

    step: float
    value: float  # infinite where it could not be computed
    slope: float


Search = Generator[float, Sample, Sample | None]


class Wolfe:
    """The conditions that a step must fulfil, seen from the point where the search starts."""

    def __init__(self, start: Sample, noise: float) -> None:
        self.start, self.noise = start, noise

    def decreases(self, sample: Sample) -> bool:
        if not math.isfinite(sample.value):
            return False
        if sample.value <= self.start.value + DECREASE * sample.step * self.start.slope:
            return True
        # Within rounding of the start only the slopes can be told apart.
        is_close = sample.value <= self.start.value + self.noise
        return is_close and sample.slope <= (2 * DECREASE - 1) * self.start.slope

    def is_flat(self, sample: Sample) -> bool:
        return abs(sample.slope) <= -CURVATURE * self.start.slope


def search(start: Sample, first_step: float, max_trials: int, noise: float = 0.0) -> Search:
    """Yields steps to try, is sent their samples; returns one that will do.

    If the trials run out it is the best that lowers the value, or None if none does.
    """
    wolfe = Wolfe(start, noise)
    previous, step, trials = start, first_step, max_trials
    while trials:
        sample = yield step
        trials -= 1
        if not wolfe.decreases(sample) or (
            previous is not start and sample.value > previous.value + noise
        ):
            return (yield from _zoom(wolfe, previous, sample, trials))
        if wolfe.is_flat(sample):
            return sample
        if sample.slope >= 0:
            return (yield from _zoom(wolfe, sample, previous, trials))
        previous, step = sample, step * WIDEN
    return previous if previous is not start else None


def _zoom(wolfe: Wolfe, low: Sample, high: Sample, trials: int) -> Search:
    """Between two samples, of which `low` is the better one, there is a step that will do."""
    while trials:
        sample = yield between(low, high, wolfe.noise)
        trials -= 1
        if not wolfe.decreases(sample) or sample.value > low.value + wolfe.noise:
            high = sample
            continue
        if wolfe.is_flat(sample):
            return sample
        if sample.slope * (high.step - low.step) >= 0:
            high = low
        low = sample
    return low if low is not wolfe.start else None


def between(low: Sample, high: Sample, noise: float = 0.0) -> float:
    """Estimate where the minimum lies, not too close to either of the samples."""
    step = None
    if math.isfinite(high.value) and math.isfinite(high.slope):
        is_noise = abs(high.value - low.value) <= noise
        step = _secant(low, high) if is_noise else _cubic(low, high)
    if step is None:
        step = 0.5 * (low.step + high.step)
    near, far = sorted((low.step, high.step))
    margin = MARGIN * (far - near)
    return min(max(step, near + margin), far - margin)


def _cubic(low: Sample, high: Sample) -> float | None:
    """The minimum of the cubic that has both values and both slopes."""
    span = high.step - low.step
    bend = low.slope + high.slope - 3 * (high.value - low.value) / span
    square = bend * bend - low.slope * high.slope
    if square < 0:
        return None
    root = math.copysign(math.sqrt(square), span)
    divisor = high.slope - low.slope + 2 * root
    return high.step - span * (high.slope + root - bend) / divisor if divisor else None


def _secant(low: Sample, high: Sample) -> float | None:
    """Return where the slope would be zero if it changed linearly."""
    change = high.slope - low.slope
    return low.step - low.slope * (high.step - low.step) / change if change else None
