"""Reading by leases: a worker trains on the rows that the driver leases to it, bit by bit.

Runs in a worker, on the thread that makes batches; its questions go to the driver's lease service
(leases.py) through the control client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sparkdml.errors import CommunicationError
from sparkdml.feed.batch import Batch
from sparkdml.feed.collate import Place
from sparkdml.feed.epoch_order import BatchRequest, PlacedOrder
from sparkdml.feed.feed import Feed
from sparkdml.feed.order import packed, unpacked
from sparkdml.feed.plan import Arrays
from sparkdml.feed.shared_rows import Piece, SharedRows
from sparkdml.feed.shared_spool import Card, OwnerGone
from sparkdml.network.timeouts import LEASE_ASK_AGAIN_SECONDS, LEASE_PATIENCE_SECONDS

AGAIN = 0  # in place of a lease's number, for rows that were confirmed before a restart

Ask = Callable[..., Any]  # ctx.ask


class PieceSource(Protocol):
    """Where the rows of leases are stored."""

    drops_last: bool

    def begin(self, request: BatchRequest) -> tuple[int, Card]:
        """How many rows this worker has in the epoch, and what others must know to read them."""
        ...

    def meet(self, owner: int, card: Card) -> None:
        """Another worker's rows of the epoch."""
        ...

    def batches(self, pieces: Iterator[Sequence[Piece]]) -> Iterator[Batch]: ...


class SpoolSource:
    """All workers' spools."""

    def __init__(self, feed: Feed, shared: SharedRows, rank: int) -> None:
        self._feed, self._shared, self._rank = feed, shared, rank
        self._orders: dict[int, PlacedOrder] = {}
        self._epoch, self._shuffle = 0, True
        self.drops_last = feed.plan.drop_last

    def begin(self, request: BatchRequest) -> tuple[int, Card]:
        self._epoch, self._shuffle = request.order_epoch, request.shuffle
        position = request.position
        own = self._shared.order(self._rank, self._epoch, self._shuffle, position)
        self._orders = {self._rank: own}
        told = None if position is None else packed(position)
        return self._orders[self._rank].num_rows, {**self._shared.card, "position": told}

    def meet(self, owner: int, card: Card) -> None:
        told = card.pop("position")
        self._shared.introduce(owner, card)
        self._shared.reach(owner)
        position = None if told is None else unpacked(told)
        self._orders[owner] = self._shared.order(owner, self._epoch, self._shuffle, position)

    def batches(self, pieces: Iterator[Sequence[Piece]]) -> Iterator[Batch]:
        places: deque[Place] = deque()  # of batches that have been read, and not yet delivered

        def take() -> Iterator[Arrays]:
            for item in pieces:
                owner, start, _ = item[0]
                places.append((self._epoch, owner, start))
                yield self._shared.take_pieces(self._orders, item)

        return self._feed.deliver(take(), lambda _: places.popleft())


class LeasedBatch(Batch):
    """Rows that this worker alone may use, as long as its lease is valid.

    `place` says which these are: the owner, and how many of its rows come before them.
    """

    def __init__(
        self, batch: Batch, place: tuple[int, int], confirm: Callable[[int], bool]
    ) -> None:
        super().__init__(dict(batch), batch.num_rows)
        self.place = place
        self._confirm: Callable[[int], bool] | None = confirm
        self._is_valid = True

    def confirm(self, mark: int = 0) -> bool:
        """Count the rows as used; False if the lease has expired and they are leased again.

        Call it before an effect that can't be undone, such as sending a gradient. Asking for the
        next batch also does it. With a `mark` the driver remembers them, for `repeat_last`.
        """
        if self._confirm is not None:
            confirm, self._confirm = self._confirm, None
            self._is_valid = confirm(mark)
        return self._is_valid


@dataclass(frozen=True)
class _Part:
    """A batch of a lease."""

    lease: int
    place: tuple[int, int]
    rows: int


class LeaseReader:
    """One worker's batches, epoch after epoch."""

    def __init__(self, ask: Ask, source: PieceSource, rank: int) -> None:
        self._ask_service, self._source, self._rank = ask, source, rank
        self._begun: int | None = None
        self._met: set[int] = set()
        self._lost: set[int] = set()  # leases that expired and were granted to others
        self._again: tuple[int, Piece] | None = None  # an epoch, and rows of it to begin with

    def batches(self, request: BatchRequest) -> Iterator[LeasedBatch]:
        """Yield this worker's batches of an epoch; each row of all workers goes to one of them."""
        self.begin(request)
        epoch, batch_size = request.epoch, request.batch_size
        gone_since = None
        while True:
            under_way: deque[_Part] = deque()
            pieces = self._pieces(request, under_way)
            try:
                for batch in self._source.batches(pieces):
                    gone_since = None
                    part = under_way.popleft()
                    if part.lease in self._lost:
                        continue
                    if part.lease == AGAIN:
                        use: Callable[[int], bool] = self._use_again
                    else:
                        use = partial(self._use, epoch, part.lease, part.rows)
                    leased = LeasedBatch(batch, part.place, use)
                    if not (self._source.drops_last and part.rows < batch_size):
                        yield leased
                    leased.confirm()
                return
            except OwnerGone:  # it may restart, or its rows may be leased to another worker
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > LEASE_PATIENCE_SECONDS:
                    raise
                for number in {part.lease for part in under_way}:
                    self._ask("back", epoch, number=number)
                self._met = {self._rank}
                time.sleep(LEASE_ASK_AGAIN_SECONDS)

    def begin(self, request: BatchRequest) -> None:
        """Report this worker's rows to the driver. A gang that does so together won't wait later.

        A second call in the same epoch does nothing.
        """
        if self._begun != request.epoch:
            num_rows, card = self._source.begin(request)
            self._ask("begin", request.epoch, rows=num_rows, card=card)
            self._begun, self._met = request.epoch, {self._rank}
            self._lost.clear()  # another epoch has leases of the same numbers

    def repeat_last(self, epoch: int) -> int:
        """After a restart: begin with the rows confirmed last, whose use is unknown.

        Returns the mark that they were confirmed with, or 0 if there are none.
        """
        use = self._ask("last", epoch)["use"]
        if use is None:
            return 0
        mark, owner, start, stop = use
        self._again = epoch, (owner, start, stop)
        return int(mark)

    def used_rows(self, epoch: int) -> int:
        """How many of this worker's own rows of the epoch have been used."""
        return int(self._ask("used", epoch)["rows"])

    def _pieces(self, request: BatchRequest, under_way: deque[_Part]) -> Iterator[Sequence[Piece]]:
        epoch, batch_size = request.epoch, request.batch_size
        if self._again is not None and self._again[0] == epoch:
            owner, start, stop = self._again[1]
            self._meet(epoch, owner)
            under_way.append(_Part(AGAIN, (owner, start), stop - start))
            yield [(owner, start, stop)]
        while True:
            answer = self._ask("next", epoch, batch=batch_size, until=request.until)
            if "over" in answer:
                return
            if "wait" in answer:
                time.sleep(LEASE_ASK_AGAIN_SECONDS)
                continue
            number, owner, start, stop = answer["lease"]
            under_way.append(_Part(number, (owner, start), 0))  # should the owner be gone
            self._meet(epoch, owner)
            under_way.pop()
            for first in range(start, stop, batch_size):
                if number in self._lost:
                    break
                last = min(first + batch_size, stop)
                under_way.append(_Part(number, (owner, first), last - first))
                yield [(owner, first, last)]

    def _meet(self, epoch: int, owner: int) -> None:
        if owner not in self._met:
            self._source.meet(owner, self._ask("card", epoch, owner=owner))
            self._met.add(owner)

    def _use_again(self, mark: int) -> bool:
        self._again = None  # the driver counts these rows as used already
        return True

    def _use(self, epoch: int, number: int, rows: int, mark: int) -> bool:
        valid = bool(self._ask("use", epoch, number=number, rows=rows, mark=mark)["valid"])
        if not valid:
            self._lost.add(number)
        return valid

    def _ask(self, what: str, epoch: int, **fields: Any) -> dict[str, Any]:
        answer = self._ask_service(f"lease.{what}", epoch=epoch, **fields)
        if answer is None:
            raise CommunicationError("the driver does not answer questions about leases")
        assert isinstance(answer, dict)
        return answer
