"""How far an epoch has been read, counted for each shard and never for a rank: pure arithmetic.

A position is an array with one number a shard: how many of its rows, in the shard's own order of
that epoch, have been trained on. It does not say which rank read them, so any number of workers can
resume from it; the positions of several workers add up.

Workers make positions and checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sparkdml.feed.order import NUM_SHARDS, Ints, owner_of

ShardOrder = Callable[[int], Ints]


def nothing_read() -> Ints:
    return np.zeros(NUM_SHARDS, dtype=np.int64)


def packed(position: Ints) -> dict[str, int]:
    """As plain JSON: what has been read of which shard."""
    return {str(shard): int(position[shard]) for shard in position.nonzero()[0]}


def unpacked(counts: dict[str, int]) -> Ints:
    position = nothing_read()
    for shard, count in counts.items():
        position[int(shard)] = int(count)
    return position


def occurrences(values: Ints) -> Ints:
    """How many equal values come before each."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.concatenate((starts, [len(values)])))
    counts = np.empty(len(values), dtype=np.int64)
    counts[order] = np.arange(len(values)) - np.repeat(starts, lengths)
    return counts


def owned(position: Ints, rank: int, num_workers: int) -> Ints:
    """The part of a position that is one worker's own, so that all parts add up again."""
    mine = owner_of(np.arange(NUM_SHARDS), num_workers) == rank
    return np.where(mine, position, 0)


class Skipper:
    """Tells which rows of a stream come behind a position."""

    def __init__(self, position: Ints) -> None:
        self._position = position
        self._seen = nothing_read()

    def is_left(self, shards: Ints) -> np.ndarray:
        """For the stream's next rows, given by their shards: whether they are still to be read."""
        left: np.ndarray = self._seen[shards] + occurrences(shards) >= self._position[shards]
        self._seen += np.bincount(shards, minlength=NUM_SHARDS)
        return left


def advance_in_order(position: Ints, shards: Ints, counts: Ints, num_rows: int) -> Ints:
    """The position after `num_rows` more rows, read shard after shard."""
    left = np.maximum(counts - position[shards], 0)
    before = np.cumsum(left) - left
    reached = position.copy()
    reached[shards] += np.clip(num_rows - before, 0, left)
    return reached


def advance_shuffled(
    position: Ints, windows: Iterable[tuple[Ints, Ints]], num_rows: int, shard_order: ShardOrder
) -> Ints:
    """The position after `num_rows` more rows, read window after window.

    `windows` has each window's shards with their counts; `shard_order(index)` gives the shards of
    one window's rows in the order in which they are read, and is asked for only one window.
    """
    reached = position.copy()
    for index, (shards, counts) in enumerate(windows):
        left = int(np.maximum(counts - position[shards], 0).sum())
        if num_rows >= left:
            reached[shards] = np.maximum(counts, position[shards])
            num_rows -= left
            continue
        rows = shard_order(index)
        rows = rows[occurrences(rows) >= position[rows]][:num_rows]
        return reached + np.bincount(rows, minlength=NUM_SHARDS)
    return reached
