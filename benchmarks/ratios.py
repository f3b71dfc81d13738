"""The arithmetic of the comparison: ratios within a round first, medians over the rounds after.

The machine drifts from minute to minute, so only measurements of the same round are divided by
each other; a ratio of two medians would compare different minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.measurement import Measurement

Round = dict[str, Measurement]  # contender's name -> its measurement in this round


@dataclass(frozen=True)
class Spread:
    """The median of a few values, and their range."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return None if there are no values: for a contender that was skipped or failed."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values), len(values))


def seconds_of(rounds: Iterable[Round], contender: str, metric: str) -> list[float]:
    """Return the contender's times in the rounds that have one."""
    measured = [entry[contender] for entry in rounds if contender in entry]
    return [each.seconds[metric] for each in measured if metric in each.seconds]


def best_in_round(entry: Round, contenders: Iterable[str], metric: str) -> float | None:
    """Return the shortest time among the contenders in this round."""
    times = [seconds_of([entry], contender, metric) for contender in contenders]
    return min((seconds for found in times for seconds in found), default=None)


def times_as_fast(
    rounds: Iterable[Round], contender: str, others: Sequence[str], metric: str
) -> Spread | None:
    """Return how many times as fast as the best of `others` the `contender` is."""
    ratios = []
    for entry in rounds:
        own = seconds_of([entry], contender, metric)
        best = best_in_round(entry, others, metric)
        if own and best is not None:
            ratios.append(best / own[0])
    return Spread.of(ratios)


def metrics_in(rounds: Iterable[Round]) -> list[str]:
    """Return every metric that was measured, in the order of first appearance."""
    seen: dict[str, None] = {}
    for entry in rounds:
        for measurement in entry.values():
            seen.update(dict.fromkeys(measurement.seconds))
    return list(seen)
