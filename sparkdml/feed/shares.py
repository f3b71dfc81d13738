"""How a step's rows are divided among ranks of different speed: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

Piece = tuple[int, int, int]  # owner, and from which to which of its rows of the epoch

NOISE = 0.1  # by which speeds of like machines differ
SMALLEST_SHARE = 1 / 16  # of an even one: a rank without rows could not show that it is quick again


def divide(total: int, speeds: Sequence[float]) -> list[int]:
    """`total` rows in proportion to the speeds, to the nearest row; nobody gets next to nothing.

    Nor a single row, where that can be avoided: BatchNorm has no use for it.
    """
    floor = SMALLEST_SHARE * sum(speeds) / len(speeds)
    raised = [max(speed, floor) for speed in speeds]
    exact = [total * speed / sum(raised) for speed in raised]
    counts = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_rest[: total - sum(counts)]:
        counts[rank] += 1
    for rank in range(len(counts)):
        others = [other for other in range(len(counts)) if other != rank]
        if counts[rank] == 1 and any(counts[other] for other in others):
            largest = max(others, key=lambda other: counts[other])
            moved = 1 if counts[largest] > 3 else -1
            counts[rank] += moved
            counts[largest] -= moved
    return counts


def hand_over(
    starts: Sequence[int], sizes: Sequence[int], counts: Sequence[int]
) -> list[list[Piece]]:
    """The pieces that each rank computes, if owner o brings `sizes[o]` rows from `starts[o]` on.

    A rank keeps its own rows, as many as it is to have; what is too many for an owner goes to those
    that have too few.
    """
    assert sum(sizes) == sum(counts), "every row is somebody's"
    kept = [min(size, count) for size, count in zip(sizes, counts, strict=True)]
    pieces: list[list[Piece]] = [
        [(rank, starts[rank], starts[rank] + kept[rank])] if kept[rank] else []
        for rank in range(len(sizes))
    ]
    owner, given = 0, kept[0] if kept else 0
    for rank, count in enumerate(counts):
        missing = count - kept[rank]
        while missing:
            while given == sizes[owner]:
                owner += 1
                given = kept[owner]
            taken = min(missing, sizes[owner] - given)
            start = starts[owner] + given
            pieces[rank].append((owner, start, start + taken))
            given += taken
            missing -= taken
    return pieces


def smooth(before: Sequence[float], seconds: Sequence[float], rows: Sequence[float]) -> list[float]:
    """The speeds in rows a second after a measurement: halfway, since a step may be an odd one.

    A rank that had no rows keeps its speed. All equal at first, whatever the unit: then the first
    measurement counts alone. What differs by no more than noise is equal: no row need move.
    """
    measured = [n / s if n and s > 0 else None for n, s in zip(rows, seconds, strict=True)]
    known = [speed for speed in measured if speed is not None]
    if not known:
        return list(before)
    if len(set(before)) == 1:
        typical = sum(known) / len(known)
        after = [typical if speed is None else speed for speed in measured]
    else:
        pairs = zip(before, measured, strict=True)
        after = [old if new is None else (old + new) / 2 for old, new in pairs]
    if max(after) <= (1 + NOISE) * min(after):
        return [sum(after) / len(after)] * len(after)
    return after
