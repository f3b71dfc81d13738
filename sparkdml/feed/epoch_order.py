"""Which rows of its spool a worker reads in one epoch, in which order, and how far it has come.

A `BatchRequest` is what a reader asks for, as one value. The loop makes one for each epoch, and
everything that reads takes it as it is: the worker's own feed, leases, and the epoch's order.

Runs in workers, on the thread that makes batches, which owns the order of its epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparkdml.feed.order import (
    Ints,
    Skipper,
    advance_in_order,
    advance_shuffled,
    nothing_read,
    occurrences,
    window_order,
    windows,
)
from sparkdml.feed.plan import FeedPlan
from sparkdml.feed.sampling import Draws


@dataclass(frozen=True, eq=False)  # arrays don't compare to one truth
class BatchRequest:
    """
    Args:
        batch_size: rows of a batch; the last one may be short.
        epoch: counted from 0.
        shuffle: whether the epoch has an order of its own.
        position: where in this worker's rows to begin; None for their start.
        until: with leases: end when this number of rows, of all workers, has been leased.
        like_epoch: with leases: the epoch whose order and random numbers the rows have, if not
            this one.
    """

    batch_size: int
    epoch: int = 0
    shuffle: bool = True
    position: Ints | None = None
    until: int | None = None
    like_epoch: int | None = None

    @property
    def order_epoch(self) -> int:
        """The epoch whose order the rows have."""
        return self.epoch if self.like_epoch is None else self.like_epoch

    @property
    def rows_before(self) -> int:
        """How many rows of this worker come before the position."""
        return 0 if self.position is None else int(self.position.sum())


class Layout(Protocol):
    """What must be known of a spool to order its rows."""

    @property
    def row_bytes(self) -> int: ...
    def layout(self) -> tuple[Ints, Ints]: ...


class EpochOrder:
    """One epoch of one worker's rows; with `draws`, a row comes as often as it is drawn."""

    def __init__(
        self, plan: FeedPlan, spool: Layout, epoch: int, shuffled: bool, draws: Draws | None
    ) -> None:
        self._plan, self._epoch, self._shuffled, self._draws = plan, epoch, shuffled, draws
        self._shards, self._row_counts = spool.layout()
        self._row_bytes = spool.row_bytes
        self._counts = self._row_counts if draws is None else draws.counts(epoch)

    @property
    def num_rows(self) -> int:
        return int(self._counts.sum())

    def stretches(self, position: Ints | None) -> Iterator[Ints]:
        """Row numbers, stretch after stretch, of what lies behind the position."""
        if not self._shuffled:
            yield from self._in_order(nothing_read() if position is None else position)
            return
        skipper = None if position is None else Skipper(position)
        for window in self._windows():
            order = self._order(window)
            rows = self._rows(window)[order] if self._draws is not None else order
            if skipper is not None:
                rows = rows[skipper.is_left(self._shards_in(window, order))]
            if len(rows):
                yield rows

    def position_after(self, num_rows: int, position: Ints | None) -> Ints:
        """Where the epoch stands once `num_rows` rows behind `position` have been used."""
        start = nothing_read() if position is None else position
        if not self._shuffled:
            return advance_in_order(start, self._shards, self._counts, num_rows)
        chosen = list(self._windows())
        return advance_shuffled(
            start,
            ((self._shards[window], self._counts[window]) for window in chosen),
            num_rows,
            lambda index: self._shards_in(chosen[index], self._order(chosen[index])),
        )

    def groups(self) -> list[np.ndarray]:
        """The windows, or one shard after the other, as indices among the shards."""
        if self._shuffled:
            return list(self._windows())
        return [np.array([index]) for index in range(len(self._shards))]

    def sizes(self, group: np.ndarray) -> tuple[Ints, Ints]:
        """The shards of a group, and how many rows each has."""
        return self._shards[group], self._counts[group]

    def group_rows(self, group: np.ndarray) -> tuple[Ints, Ints]:
        """A group's row numbers in the order in which they are read, and the shard of each."""
        assert self._draws is None, "rows that are drawn have no place"
        if self._shuffled:
            rows = self._order(group)
            return rows, self._shards_in(group, rows)
        start = int(self._row_counts[: group[0]].sum())
        count = int(self._counts[group[0]])
        return np.arange(start, start + count), np.full(count, self._shards[group[0]])

    def _in_order(self, position: Ints) -> Iterator[Ints]:
        starts = np.cumsum(self._row_counts) - self._row_counts
        for index, (start, count) in enumerate(zip(starts, self._counts, strict=True)):
            done = min(int(position[self._shards[index]]), int(count))
            if done < count:
                if self._draws is None:
                    yield np.arange(start + done, start + count)
                else:
                    yield self._draws.rows(self._epoch, np.array([index]))[done:]

    def _windows(self) -> Iterator[np.ndarray]:
        by_bytes = self._plan.max_window_bytes // max(1, self._row_bytes)
        max_rows = max(1, min(self._plan.max_window_rows, by_bytes))
        # Rows that are never drawn are looked at all the same.
        sizes = np.maximum(self._counts, self._row_counts)
        return windows(
            self._plan.seed, self._epoch, shards=self._shards, counts=sizes, max_rows=max_rows
        )

    def _rows(self, window: np.ndarray) -> Ints:
        """The row number of each draw of a window."""
        assert self._draws is not None
        return self._draws.rows(self._epoch, window)

    def _order(self, window: np.ndarray) -> Ints:
        """A window shuffled: its row numbers, or with draws the numbers of the window's draws."""
        starts = np.cumsum(self._counts) - self._counts
        if self._draws is not None:
            lengths = self._counts[window]
            starts = np.zeros_like(starts)
            starts[window] = np.cumsum(lengths) - lengths
        return window_order(
            self._plan.seed,
            self._epoch,
            shards=self._shards,
            starts=starts,
            counts=self._counts,
            window=window,
        )

    def _shards_in(self, window: np.ndarray, order: Ints) -> Ints:
        """The shard of each row of a window's order."""
        if self._draws is None:
            return self._shards[np.searchsorted(np.cumsum(self._counts), order, side="right")]
        return np.repeat(self._shards[window], self._counts[window])[order]


class PlacedOrder:
    """An epoch's rows behind a position by their place in it, for readers of stretches of it.

    A window is sorted when one of its rows is first asked for, and kept while the next ones are of
    the same.
    """

    def __init__(self, order: EpochOrder, position: Ints | None) -> None:
        self._order = order
        self._position = nothing_read() if position is None else position
        self._groups = order.groups()
        left = [self._left(group) for group in self._groups]
        self._ends = np.cumsum(np.array(left, dtype=np.int64))
        self._sorted: tuple[int, Ints] | None = None

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, start: int, stop: int) -> Ints:
        """The row numbers of a stretch."""
        parts: list[Ints] = []
        while start < stop:
            index = int(np.searchsorted(self._ends, start, side="right"))
            end = int(self._ends[index])
            before = int(self._ends[index - 1]) if index else 0
            parts.append(self._group(index)[start - before : min(stop, end) - before])
            start = min(stop, end)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _left(self, group: np.ndarray) -> int:
        shards, counts = self._order.sizes(group)
        return int(np.maximum(counts - self._position[shards], 0).sum())

    def _group(self, index: int) -> Ints:
        if self._sorted is None or self._sorted[0] != index:
            rows, shards = self._order.group_rows(self._groups[index])
            self._sorted = index, rows[occurrences(shards) >= self._position[shards]]
        return self._sorted[1]
