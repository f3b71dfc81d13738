"""All workers' rows, read by any of them: its own from its spool, others' as `shared_spool` says.

An epoch's rows are spoken of by owner and place: the place is in the owner's own order of the
epoch, behind its own position if the run was resumed, just as the owner itself would read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sparkdml.comm.traffic import Traffic
from sparkdml.errors import ParameterError
from sparkdml.feed.agreement import Worker, exchange
from sparkdml.feed.cutting import join
from sparkdml.feed.epoch_order import EpochOrder, PlacedOrder
from sparkdml.feed.feed import Feed
from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Arrays
from sparkdml.feed.row_wire import OwnerGone, RemoteRows, RowServer
from sparkdml.feed.shared_spool import Card, Rows, Shelf, card_of, open_here
from sparkdml.feed.shares import Piece

Orders = Sequence[PlacedOrder] | Mapping[int, PlacedOrder]


class SharedRows:
    """One worker's view of everybody's rows. `introduce` says who the others are."""

    def __init__(self, feed: Feed, rank: int, key: str, maps: bool = True) -> None:
        """With `maps=False` nothing is mapped, as if every worker were on a host of its own."""
        if feed.plan.sampling is not None:
            raise ParameterError(
                "samplingCol", feed.plan.sampling, "left out where rows move between workers"
            )
        feed.ingest()
        self._feed, self._rank, self._key, self._maps = feed, rank, key, maps
        self.card: Card = card_of(feed.training_spool)
        self._cards: dict[int, Card] = {rank: self.card}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._rows: dict[int, Rows] = {rank: feed.training_spool}
        self._server: RowServer | None = None

    def serve(self, host: str, traffic: Traffic | None = None) -> None:
        """Be there for workers that can't map this one's spool."""
        if self._server is None:
            self._server = RowServer(self._feed.training_spool, host, self._key, traffic)
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
        return PlacedOrder(EpochOrder(self._feed.plan, shelf, epoch, shuffled, None), position)

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
            self._rows[owner] = RemoteRows(self._cards[owner], address, self._key)
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
    """Introduce all ranks to each other; a wire is opened only where a spool can't be mapped."""
    cards = exchange(shared.card, worker)
    reachable = [shared.introduce(owner, card) for owner, card in enumerate(cards)]
    wanted = exchange(reachable, worker)
    if not all(map(all, wanted)):
        if not all(row[worker.comm.rank] for row in wanted):
            serve()
        for owner, card in enumerate(exchange(shared.card, worker)):
            shared.introduce(owner, card)
