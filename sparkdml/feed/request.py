"""What a reader asks of a feed, as one value: which epoch, in which order, from where, how much.

A plain value of the worker's process. The loop makes one for each epoch, and everything that reads
takes it as it is: the worker's own feed, leases, and the epoch's order.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdml.feed.order import Ints


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
