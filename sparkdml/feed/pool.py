"""One epoch of all workers' rows, to be read in pieces by any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparkdml.feed.agreement import Worker, exchange
from sparkdml.feed.augment import InOrder
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import Feed
from sparkdml.feed.order import Ints
from sparkdml.feed.position import packed, unpacked
from sparkdml.feed.shared_rows import SharedRows
from sparkdml.feed.shares import Piece


class Pool:
    """`counts` has every owner's number of rows; a piece is a stretch of an owner's order."""

    def __init__(
        self,
        feed: Feed,
        shared: SharedRows,
        epoch: int,
        shuffle: bool,
        positions: Sequence[Ints | None],
    ) -> None:
        self._feed, self._shared = feed, shared
        self._epoch, self._rank = epoch, feed.rank
        self._orders = [
            shared.order(owner, epoch, shuffle, position)
            for owner, position in enumerate(positions)
        ]
        self.counts = [order.num_rows for order in self._orders]
        self.drops_last = feed.plan.drop_last

    def batches(self, pieces: Iterator[Sequence[Piece]], rows_before: int = 0) -> Iterator[Batch]:
        """A batch for each item, none of which is empty."""
        arrays = (self._shared.take_pieces(self._orders, item) for item in pieces)
        return self._feed.deliver(arrays, InOrder(self._epoch, self._rank, rows_before))


def exchange_positions(position: Ints | None, worker: Worker) -> list[Ints | None]:
    """Every rank's own position; None where an epoch begins at its start."""
    told = exchange(None if position is None else packed(position), worker)
    return [None if one is None else unpacked(one) for one in told]
