"""What became of one strategy, as numbers that can be compared; the arithmetic is pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """One row of the table. Seconds, bytes and messages are of a rank, the mean over all."""

    name: str
    workers: int = 0
    epochs: int = 0
    steps: int = 0  # see `result.LEGEND`
    seconds: float = math.nan  # of the epochs, without start-up and validation
    wall_seconds: float = math.nan  # of the whole fit
    compute_seconds: float = math.nan  # forward, backward, optimizer, and waiting for data
    communication_seconds: float = math.nan  # and waiting for slower ranks
    sent_bytes: float = math.nan  # to others, by a wire or through memory
    messages: float = math.nan
    loss: float = math.nan  # of the trained model on all rows
    metrics: Mapping[str, float] = field(default_factory=dict)
    distance: float = math.nan  # of its weights from the single process's, relative to their length
    error: str | None = None  # why there are no numbers

    @property
    def costs(self) -> tuple[float, float, float]:
        """Computation, communication, and what is lacking in accuracy."""
        return self.compute_seconds, self.sent_bytes, self.loss


def distance(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """How far two states of one model are apart, relative to the length of the reference."""
    apart = length = 0.0
    for name, expected in reference.items():
        if expected.is_floating_point():
            there = expected.detach().double().cpu()
            apart += float((found[name].detach().double().cpu() - there).square().sum())
            length += float(there.square().sum())
    return math.sqrt(apart / length) if length else math.sqrt(apart)


def on_frontier(costs: Sequence[Sequence[float]]) -> list[bool]:
    """Which of them no other one beats: at least as good in everything, and better in something."""

    def beats(one: Sequence[float], other: Sequence[float]) -> bool:
        pairs = list(zip(one, other, strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return [
        all(math.isfinite(cost) for cost in mine) and not any(beats(other, mine) for other in costs)
        for mine in costs
    ]
