"""In which order rows are read, and how far: pure arithmetic over (seed, epoch, shard, index).

A shard is a range of the rows' 64-bit hashes. There are always NUM_SHARDS of them, whatever the
number of workers, so that an order can be described without naming a rank. Within an epoch each
row has a key that depends only on (seed, epoch, shard, index within the shard); a shard's rows come
in the order of their keys, and a worker merges its shards by the same keys. Hence any split of the
shards among workers leaves every shard's own order as it was.

A position is an array with one number a shard: how many of its rows, in the shard's own order of
that epoch, have been trained on. It does not say which rank read them, so any number of workers can
resume from it; the positions of several workers add up.

Runs in workers, on the thread that makes batches; the driver knows the owners of shards by it, and
checkpoints hold positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

SHARD_BITS = 12
NUM_SHARDS = 1 << SHARD_BITS

Ints = npt.NDArray[np.int64]
ShardOrShards = TypeVar("ShardOrShards", int, Ints)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shard_of(hashes: Ints) -> Ints:
    """The shard of each row: the top bits of its hash."""
    return (hashes.view(np.uint64) >> np.uint64(64 - SHARD_BITS)).astype(np.int64)


def owner_of(shard: ShardOrShards, num_workers: int) -> ShardOrShards:
    """The rank that reads a shard; of each shard, for an array of them."""
    return shard % num_workers


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al. 2014): neighbours become unrelated."""
    values = values * _GOLDEN
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _salt(seed: int, epoch: int, stream: int) -> np.uint64:
    state = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)
    for value in (epoch, stream):
        state = mix(state ^ np.uint64(value + 1))
    return np.uint64(state[0])


def row_keys(seed: int, epoch: int, shards: Ints, indices: Ints) -> npt.NDArray[np.uint32]:
    """The sort key of each row in one epoch."""
    values = (shards.astype(np.uint64) << np.uint64(40)) | indices.astype(np.uint64)
    return (mix(values ^ _salt(seed, epoch, stream=1)) >> np.uint64(32)).astype(np.uint32)


def uniforms(seed: int, epoch: int, shards: Ints, indices: Ints) -> npt.NDArray[np.float64]:
    """A random number of each row in one epoch, at least 0 and below 1."""
    values = (shards.astype(np.uint64) << np.uint64(40)) | indices.astype(np.uint64)
    words = mix(values ^ _salt(seed, epoch, stream=3)) >> np.uint64(11)
    return words.astype(np.float64) * 2.0**-53


def argsort_keys(keys: npt.NDArray[np.uint32]) -> Ints:
    """A stable argsort in two radix passes: four times faster than a comparison sort."""
    low = np.argsort(keys.astype(np.uint16), kind="stable")
    high = np.argsort((keys >> np.uint32(16)).astype(np.uint16)[low], kind="stable")
    return low[high]


def windows(
    seed: int, epoch: int, shards: Ints, counts: Ints, max_rows: int
) -> Iterator[npt.NDArray[np.intp]]:
    """Groups of a worker's shards, as positions in `shards`, to be shuffled together.

    The shards themselves come in an order of their own each epoch. A window bounds what is touched
    at once: memory for the permutation, and locality on the disk. A shard larger than a window is
    a window of its own.
    """
    keys = mix(shards.astype(np.uint64) ^ _salt(seed, epoch, stream=2))
    order = np.argsort(keys, kind="stable")
    start, rows = 0, 0
    for end, position in enumerate(order):
        if rows and rows + counts[position] > max_rows:
            yield order[start:end]
            start, rows = end, 0
        rows += int(counts[position])
    if rows:
        yield order[start:]


def window_order(
    seed: int, epoch: int, shards: Ints, starts: Ints, counts: Ints, window: npt.NDArray[np.intp]
) -> Ints:
    """The row numbers of one window, shuffled. `starts` has each shard's first row number."""
    lengths = counts[window]
    offsets = np.cumsum(lengths) - lengths
    indices = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(offsets, lengths)
    keys = row_keys(seed, epoch, np.repeat(shards[window], lengths), indices)
    return (np.repeat(starts[window], lengths) + indices)[argsort_keys(keys)]


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
