"""How often each row is drawn in an epoch, if a column says so: pure arithmetic.

A row of weight w is drawn w times as often as one of weight 1; all rates are scaled so that an
epoch has about as many draws as there are rows. The number of draws is the rate rounded up or down,
by a random number that depends only on (seed, epoch, shard, index in the shard): a rate of 2.3
gives 2 draws or 3, and 2.3 in the mean over epochs. So the draws of a shard don't depend on which
worker reads it.

The draws of a shard take the place of its rows: they are numbered, shuffled by the same keys, and
positions count them. Runs in workers, on the thread that makes batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from sparkdml.feed.order import NUM_SHARDS, Ints, uniforms

ROWS_AT_ONCE = 1 << 20


class Draws:
    """The draws of one worker's shards, epoch by epoch."""

    def __init__(
        self, seed: int, rate: float, shards: Ints, counts: Ints, weights: np.ndarray
    ) -> None:
        self._seed, self._rate = seed, rate
        self._shards, self._row_counts = shards, counts
        self._starts = np.cumsum(counts) - counts
        self._weights = weights
        self._counted: tuple[int, Ints] | None = None  # the last epoch, and its counts

    def counts(self, epoch: int) -> Ints:
        """How many draws each shard has."""
        counted = self._counted
        if counted is None or counted[0] != epoch:
            counts = np.zeros(len(self._shards), dtype=np.int64)
            for group in self._groups():
                lengths = self._row_counts[group]
                ends = np.cumsum(lengths)
                sums = np.concatenate(([0], np.cumsum(self._draws(epoch, group)[1])))
                counts[group] = sums[ends] - sums[ends - lengths]
            self._counted = counted = epoch, counts
        return counted[1]

    def rows(self, epoch: int, shards: Ints) -> Ints:
        """The row numbers that are drawn from some shards, in the order of rows."""
        rows, draws = self._draws(epoch, shards)
        return np.repeat(rows, draws)

    def _draws(self, epoch: int, which: Ints) -> tuple[Ints, Ints]:
        """The row numbers of some of the shards, and how often each is drawn."""
        lengths = self._row_counts[which]
        offsets = np.cumsum(lengths) - lengths
        indices = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(offsets, lengths)
        rows = np.repeat(self._starts[which], lengths) + indices
        chance = uniforms(self._seed, epoch, np.repeat(self._shards[which], lengths), indices)
        return rows, np.floor(self._rate * self._weights[rows] + chance).astype(np.int64)

    def _groups(self) -> list[Ints]:
        """The shards in groups of bounded size."""
        which = np.arange(len(self._shards))
        if not len(which):
            return []
        number = self._starts // ROWS_AT_ONCE
        return np.split(which, np.flatnonzero(np.diff(number)) + 1)


def weight_sums(shards: Ints, counts: Ints, weights: np.ndarray) -> np.ndarray:
    """For each of all shards its rows and the sum of their weights, as an array of (2, shards).

    By shard, so that the sums have the same bits whichever worker owns the shard.
    """
    sums = np.zeros((2, NUM_SHARDS))
    for shard, end, count in zip(
        shards.tolist(), np.cumsum(counts).tolist(), counts.tolist(), strict=True
    ):
        sums[:, shard] = count, weights[end - count : end].sum()
    return sums


def rate_of(sums: np.ndarray) -> float:
    """Draws for each unit of weight, given the sums over all workers; 0 if all weights are 0."""
    rows, weights = (math.fsum(row) for row in sums.tolist())
    return rows / weights if weights else 0.0


SumOverRanks = Callable[[np.ndarray], np.ndarray]
