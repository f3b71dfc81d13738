"""All workers' rows, read by any of them, and how a step's rows are divided among the ranks.

A worker reads its own rows from its spool, and other workers' as `shared_spool` says. An epoch's
rows are named by owner and place: the place is in the owner's own order of the epoch, behind its
own position if the run was resumed, just as the owner itself would read them. How rows are divided
among ranks of different speed is pure arithmetic.

Runs in workers: rows are read on the thread that makes batches, and exchanges among the ranks are
made on the thread that trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from sparkdml.comm.base import Traffic
from sparkdml.errors import ParameterError
from sparkdml.feed.agreement import Worker, exchange
from sparkdml.feed.batch import Batch, join
from sparkdml.feed.collate import InOrder
from sparkdml.feed.epoch_order import EpochOrder, PlacedOrder
from sparkdml.feed.feed import Feed
from sparkdml.feed.order import Ints, packed, unpacked
from sparkdml.feed.plan import Arrays
from sparkdml.feed.shared_spool import (
    Card,
    OwnerGone,
    RemoteRows,
    Rows,
    RowServer,
    Shelf,
    card_of,
    open_here,
)
from sparkdml.network.timeouts import Timeouts

Piece = tuple[int, int, int]  # owner, and from which to which of its rows of the epoch

NOISE = 0.1  # by which speeds of like machines differ
SMALLEST_SHARE = 1 / 16  # of an even one: a rank without rows could not show that it is quick again


def divide(total: int, speeds: Sequence[float]) -> list[int]:
    """`total` rows in proportion to the speeds, to the nearest row; no rank gets next to nothing.

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
    assert sum(sizes) == sum(counts), "every row has an owner"
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


Orders = Sequence[PlacedOrder] | Mapping[int, PlacedOrder]


class SharedRows:
    """One worker's view of all workers' rows. `introduce` says who the others are."""

    def __init__(
        self,
        feed: Feed,
        rank: int,
        key: str,
        maps: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        """With `maps=False` nothing is mapped, as if every worker were on a host of its own."""
        if feed.plan.sampling is not None:
            raise ParameterError(
                "samplingCol", feed.plan.sampling, "left out where rows move between workers"
            )
        feed.ingest()
        self._timeouts = timeouts or Timeouts()
        self._feed, self._rank, self._key, self._maps = feed, rank, key, maps
        self.card: Card = card_of(feed.training_spool)
        self._cards: dict[int, Card] = {rank: self.card}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._rows: dict[int, Rows] = {rank: feed.training_spool}
        self._server: RowServer | None = None

    def serve(self, host: str, traffic: Traffic | None = None) -> None:
        """Be there for workers that can't map this one's spool."""
        if self._server is None:
            self._server = RowServer(
                self._feed.training_spool,
                host,
                token=self._key,
                timeouts=self._timeouts,
                traffic=traffic,
            )
            self.card["address"] = list(self._server.address)

    def introduce(self, owner: int, card: Card) -> bool:
        """Whether an owner's rows can be read from here; without an address they must be mapped."""
        if owner == self._rank or (self._cards.get(owner) == card and owner in self._rows):
            return True
        self._forget(owner)
        self._cards[owner] = card
        mapped = open_here(card) if self._maps else None
        if mapped is not None:
            self._rows[owner] = mapped
        elif "address" in card:
            host, port = card["address"]
            self._addresses[owner] = str(host), int(port)
        return mapped is not None or "address" in card

    def order(
        self, owner: int, epoch: int, shuffle: bool, position: Ints | None = None
    ) -> PlacedOrder:
        """An owner's order of an epoch."""
        shuffled = self._feed.is_shuffled(epoch, shuffle)
        shelf = Shelf(self._cards[owner])
        return PlacedOrder(
            EpochOrder(self._feed.plan, shelf, epoch=epoch, shuffled=shuffled, draws=None), position
        )

    def take(self, owner: int, rows: Ints) -> Arrays:
        """Some of an owner's rows by their numbers in its spool."""
        try:
            return self.reach(owner).take(rows)
        except OwnerGone:
            self._forget(owner)
            raise

    def reach(self, owner: int) -> Rows:
        """An owner's rows, wherever they are."""
        if owner not in self._rows:
            address = self._addresses.get(owner)
            if address is None:
                raise OwnerGone(f"the rows of rank {owner} can't be reached from here")
            self._rows[owner] = RemoteRows(self._cards[owner], address, self._key, self._timeouts)
        return self._rows[owner]

    def take_pieces(self, orders: Orders, pieces: Sequence[Piece]) -> Arrays:
        """Several pieces as one batch; `orders` has the order of each owner."""
        return join([self.take(o, orders[o].rows(start, stop)) for o, start, stop in pieces])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for owner in list(self._rows):
            self._forget(owner)

    def _forget(self, owner: int) -> None:
        rows = self._rows.pop(owner, None)
        if rows is not None and owner != self._rank:
            rows.close()
        self._addresses.pop(owner, None)


def share_among(shared: SharedRows, worker: Worker, serve: Callable[[], None]) -> None:
    """Introduce all ranks to each other; connect only where a spool can't be mapped."""
    cards = exchange(shared.card, worker)
    reachable = [shared.introduce(owner, card) for owner, card in enumerate(cards)]
    wanted = exchange(reachable, worker)
    if not all(map(all, wanted)):
        if not all(row[worker.comm.rank] for row in wanted):
            serve()
        for owner, card in enumerate(exchange(shared.card, worker)):
            shared.introduce(owner, card)


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
