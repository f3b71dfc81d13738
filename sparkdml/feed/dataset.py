"""A worker's rows as a dataset that is built up step by step, for users who know tf.data.

Runs in a worker, on the thread of the user's function; `prefetch` adds one that reads ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from sparkdml.errors import ParameterError, check_whole
from sparkdml.feed.batch import Batch
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Feed

ROWS_AT_ONCE = 1024

Again = Callable[[], Iterator[Any]]  # another pass over what comes before
Stage = Callable[[Again], Iterator[Any]]


@dataclass(frozen=True)
class Source:
    """Where the rows come from: each pass is the next epoch of the feed."""

    feed: Feed
    epochs: Iterator[int]
    shuffled: bool = False
    batch_size: int | None = None  # None: row by row
    drop_last: bool = False

    def read(self) -> Iterator[Any]:
        rows = self.batch_size or ROWS_AT_ONCE
        for batch in self.feed.batches(BatchRequest(rows, next(self.epochs), self.shuffled)):
            if self.batch_size is None:
                for row in range(batch.num_rows):
                    yield {name: tensor[row] for name, tensor in batch.items()}
            elif batch.num_rows == rows or not self.drop_last:
                yield batch


class Dataset:
    """This worker's rows, transformed lazily; each method gives a new dataset.

    At first an element is one row: a dict of tensors by column name. `batch` makes batches of them,
    and what comes after it sees many rows at once, which is much faster.

    >>> rows = ctx.dataset().shuffle().filter(lambda row: row["label"] >= 0).batch(64)
    >>> for batch in rows.prefetch(2):
    ...     train(batch["features"], batch["label"])

    Each pass over it is another epoch, reshuffled if `shuffle` was called; without, the order
    is always that of the rows' hashes. Ranks have different rows and may differ in their number.
    """

    def __init__(self, source: Source, stages: tuple[Stage, ...] = (), fixed: bool = False) -> None:
        self._source = source
        self._stages = stages
        self._fixed = fixed  # whether shuffling rows at the source would now be another thing

    @classmethod
    def over(cls, feed: Feed, epoch: int = 0) -> Dataset:
        return cls(Source(feed, count(epoch)))

    def __iter__(self) -> Iterator[Any]:
        return self._pass(len(self._stages))

    def _pass(self, depth: int) -> Iterator[Any]:
        if not depth:
            return self._source.read()
        return self._stages[depth - 1](lambda: self._pass(depth - 1))

    def _then(self, stage: Stage, fixed: bool = False) -> Dataset:
        return Dataset(self._source, (*self._stages, stage), self._fixed or fixed)

    def map(self, fn: Callable[[Any], Any]) -> Dataset:
        """What `fn` makes of each element."""
        _check_function("map(fn)", fn)
        return self._then(lambda again: map(fn, again()))

    def filter(self, fn: Callable[[Any], Any]) -> Dataset:
        """The elements of which `fn` says that they are wanted."""
        _check_function("filter(fn)", fn)
        return self._then(lambda again: (element for element in again() if fn(element)))

    def shuffle(self) -> Dataset:
        """All of the rows in another order each epoch, as the feed shuffles them: no buffer.

        Rows are shuffled where they are read, so it must come before `batch`, `take` and `repeat`.
        The first epoch comes in the order of the rows' hashes, which is a shuffle in itself.
        """
        if self._fixed:
            raise ParameterError(
                "shuffle()",
                "after batch(), take() or repeat()",
                "called before them",
                "It shuffles all rows of the worker, where they are read.",
            )
        return Dataset(replace(self._source, shuffled=True), self._stages)

    def batch(self, n: int, drop_last: bool = False) -> Dataset:
        """`n` elements as one, stacked along a new first dimension; the last may be short."""
        check_whole("batch(n)", n, 1)
        if not self._stages and self._source.batch_size is None:  # as the feed cuts them by itself
            return Dataset(replace(self._source, batch_size=n, drop_last=drop_last), fixed=True)
        return self._then(lambda again: _batched(again(), n, drop_last), fixed=True)

    def repeat(self, n: int | None = None) -> Dataset:
        """`n` passes one after the other, or passes without end."""
        if n is not None:
            check_whole("repeat(n)", n, 1)
        return self._then(lambda again: _repeated(again, n), fixed=True)

    def take(self, n: int) -> Dataset:
        """The first `n` elements of each pass."""
        check_whole("take(n)", n, 0)
        return self._then(lambda again: islice(again(), n), fixed=True)

    def prefetch(self, n: int = 2) -> Dataset:
        """Compute up to `n` elements ahead, on a thread of their own."""
        check_whole("prefetch(n)", n, 1)
        feed = self._source.feed
        return self._then(lambda again: _ahead(feed, again(), n), fixed=True)


def _batched(elements: Iterator[Any], n: int, drop_last: bool) -> Iterator[Any]:
    while part := list(islice(elements, n)):
        if len(part) == n or not drop_last:
            stacked = default_collate(part)
            yield _as_batch(stacked, len(part)) if isinstance(stacked, dict) else stacked


def _as_batch(columns: dict[str, Any], num_rows: int) -> Any:
    """A Batch, as the feed itself gives them, unless there is more in it than tensors."""
    if all(isinstance(value, Tensor) for value in columns.values()):
        return Batch(columns, num_rows)
    return columns


def _repeated(again: Again, n: int | None) -> Iterator[Any]:
    for _ in count() if n is None else range(n):
        has_any = False
        for element in again():
            has_any = True
            yield element
        if not has_any:
            return  # or an empty dataset would never end


def _ahead(feed: Feed, elements: Iterator[Any], n: int) -> Iterator[Any]:
    reader = feed.ahead(elements, n)
    try:
        yield from reader
    finally:
        reader.close()


def _check_function(what: str, fn: object) -> None:
    if not callable(fn):
        raise ParameterError(what, fn, "a function of one element")
