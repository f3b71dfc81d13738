"""The worker's side of the feed: a stream of rows in, batches of tensors out, epoch after epoch.

Epoch 0 is read straight from Spark's stream, in the order of the rows' hashes (which is a shuffle
in itself, and depends on the seed), while the rows are spooled to local disk. Later epochs are read
from the spool, shuffled. Memory stays bounded by a few chunks of the stream and one window's row
numbers, however large the partition is.

A Feed belongs to its worker for the length of a run. It reads on the thread that asks for batches;
a Prefetch runs such an iterator on a thread of its own, some batches ahead. A ReadAhead stays on
its consumer's thread: what it hides is not the reading itself but its unevenness. Ranks are never
quite alike; one that arrives early at a collective would only wait, so it reads its next batch in
that time.
"""

from __future__ import annotations

import json
import queue
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch, count_not_finite, cut, select, without_short
from sparkdml.feed.collate import Collator, InOrder, Place, augmented
from sparkdml.feed.epoch_order import BatchRequest, EpochOrder
from sparkdml.feed.order import Ints, Skipper, shard_of
from sparkdml.feed.plan import Arrays
from sparkdml.feed.plan import Chunk as Chunk
from sparkdml.feed.plan import FeedPlan as FeedPlan
from sparkdml.feed.plan import is_validation as is_validation
from sparkdml.feed.sampling import Draws, SumOverRanks, rate_of, weight_sums
from sparkdml.feed.spool import Spool

T = TypeVar("T")

CLOSE_SECONDS = 10.0


class Prefetch(Iterator[T]):
    """At most `depth` items wait. An error in the source is raised where the item is asked for."""

    def __init__(self, source: Iterator[T], depth: int = 2) -> None:
        self._source = source
        self._items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._fill, name="sparkdml-prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for item in self._source:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._items.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> T:
        if self._finished:
            raise StopIteration
        item, error = self._items.get()
        if error is not None:
            self._finished = True
            self._thread.join()
            raise error
        return item  # type: ignore[return-value]  # an item without an error is a T

    @property
    def is_over(self) -> bool:
        return self._finished

    def close(self) -> None:
        """Stop early: the thread ends after the item that it is at, which may never come."""
        self._finished = True
        self._closed.set()
        self._thread.join(timeout=CLOSE_SECONDS)


KEPT_PREFIX = "sparkdml-spool-"  # then what `mkdtemp` makes up: [a-z0-9_]
LAYOUT = "layout.json"  # written last: a folder that has it is whole


class Feed:
    """The rows that one worker owns. Read the epochs in turn; each row comes once in each.

    With a sampling column, a row comes as often as it is drawn.
    """

    def __init__(
        self,
        source: Iterator[Chunk],
        plan: FeedPlan,
        directory: str,
        device: torch.device | str = "cpu",
        on_sealed: Callable[[str], None] | None = None,
        rank: int = 0,
    ) -> None:
        """With `on_sealed` the spool is kept for others, and its folder told once it is whole."""
        self.plan = plan
        self.device = torch.device(device)
        self.rank = rank
        self._on_sealed = on_sealed
        self.folder: Path | None = None
        if on_sealed is not None:
            self.folder = Path(tempfile.mkdtemp(prefix=KEPT_PREFIX, dir=directory))
        self._training = Spool(directory, self.folder and self.folder / "training")
        self._held_out = Spool(directory, self.folder and self.folder / "validation")
        self.not_finite: Counter[str] = Counter()  # rows with NaN or infinity, if asked for
        self._draws: Draws | None = None
        self._incoming: Prefetch[tuple[Arrays, Ints]] | None = Prefetch(self._receive(source))
        self._streamed = False
        self._readers: list[Prefetch[Any]] = []
        self._registering = threading.Lock()

    @classmethod
    def reopen(
        cls, folder: str, plan: FeedPlan, device: torch.device | str = "cpu", rank: int = 0
    ) -> Feed:
        """The rows that a worker before this one has spooled."""
        feed = cls(iter(()), plan, folder, device, rank=rank)
        feed.ingest()
        description = json.loads(Path(folder, LAYOUT).read_text())
        feed.folder = Path(folder)
        feed._training = Spool.reopen(feed.folder / "training", description["training"])
        feed._held_out = Spool.reopen(feed.folder / "validation", description["validation"])
        feed.not_finite = Counter(description["not_finite"])
        feed.agree_on_draws()
        return feed

    # -- what users read ------------------------------------------------------------------------

    def batches(self, request: BatchRequest) -> Iterator[Batch]:
        """One epoch of this worker's training rows, or what lies behind a position in it.

        The last batch may be short, unless the plan says that such a batch is dropped.
        """
        epoch, position, batch_size = request.epoch, request.position, request.batch_size
        if self._incoming is not None and self.plan.reads_all_first:
            self.ingest()
        if epoch == 0 and self._incoming is not None and not self._streamed:
            self._streamed = True
            chunks = cut(self._stream(position), batch_size)
        else:
            self.ingest()
            is_shuffled = self.is_shuffled(epoch, request.shuffle)
            if position is None and not is_shuffled and self._draws is None:
                chunks = self._slices(self._training, batch_size)
            else:
                chunks = self._taken(request)
        if self.plan.drop_last:
            chunks = without_short(chunks, batch_size)
        return self.deliver(chunks, InOrder(epoch, self.rank, request.rows_before))

    def deliver(
        self, chunks: Iterator[Arrays], place_of: Callable[[Batch], Place]
    ) -> Iterator[Batch]:
        """Rows of an epoch, wherever they come from, as batches to train on."""
        batches = self._deliver(chunks)
        if self.plan.augment is None:
            return batches
        return augmented(
            batches, self.plan.augment, seed=self.plan.seed, place_of=place_of, device=self.device
        )

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out rows, always in the same order, each once."""
        self.ingest()
        return self._deliver(self._slices(self._held_out, batch_size))

    def position_after(self, num_rows: int, request: BatchRequest) -> Ints:
        """Where an epoch stands once `num_rows` rows of the request have been used.

        Costs up to one sort of a window, and may be called from another thread.
        """
        order = self._order(request.epoch, request.shuffle)
        return order.position_after(num_rows, request.position)

    @property
    def num_rows(self) -> int:
        """How many training rows this worker owns. Reads the rest of the stream first."""
        self.ingest()
        return self._training.num_rows

    def num_rows_in(self, epoch: int, batch_size: int) -> int:
        """How many rows this worker has in an epoch, in batches that are not dropped."""
        self.ingest()
        count = self._order(epoch, shuffle=True).num_rows
        return count - count % batch_size if self.plan.drop_last else count

    @property
    def num_validation_rows(self) -> int:
        self.ingest()
        return self._held_out.num_rows

    def ingest(self) -> None:
        """Read what is left of the stream into the spool."""
        for _ in self._stream(None):
            pass

    def agree_on_draws(self, sum_over_ranks: SumOverRanks = np.copy) -> None:
        """With a sampling column: how often rows are drawn depends on those of all workers."""
        if self.plan.sampling is None:
            return
        self.ingest()
        shards, counts = self._training.layout()
        weights = self._training.draws()
        rate = rate_of(sum_over_ranks(weight_sums(shards, counts, weights)))
        self._draws = Draws(self.plan.seed, rate, shards=shards, counts=counts, weights=weights)
        if not rate and self._training.num_rows:
            raise DataError(
                f"samplingCol {self.plan.sampling!r} is 0 in every row that is trained on, so no "
                "row would ever be drawn"
            )

    @property
    def training_spool(self) -> Spool:
        return self._training

    def ahead(self, items: Iterator[T], depth: int) -> Prefetch[T]:
        """Read ahead on a thread, which ends with the feed if its reader leaves early."""
        with self._registering:  # what is read ahead may itself read ahead, on its own thread
            self._readers = [reader for reader in self._readers if not reader.is_over]
            reader = Prefetch(items, depth=depth)
            self._readers.append(reader)
        return reader

    def close(self, keep: bool = False) -> None:
        """Stop reading. A spool that was kept for others goes too, unless they may still come."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        for reader in self._readers:
            reader.close()
        self._training.close()
        self._held_out.close()
        if self.folder is not None and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)  # gone already, or Spark's to remove

    # -- from the stream ------------------------------------------------------------------------

    def _receive(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Arrays, Ints]]:
        """Spool each chunk, then hand out its training rows; runs on the prefetch thread."""
        for chunk in chunks:
            hashes, columns, draws = chunk.hashes, chunk.columns, chunk.draws
            if self.plan.check_finite:
                found = {name: count_not_finite(values) for name, values in columns.items()}
                self.not_finite.update({name: n for name, n in found.items() if n})
            held_out = self._is_held_out(chunk)
            if held_out is not None:
                self._held_out.append(select(columns, held_out), shard_of(hashes[held_out]))
                hashes, columns = hashes[~held_out], select(columns, ~held_out)
                draws = None if draws is None else draws[~held_out]
            shards = shard_of(hashes)
            self._training.append(columns, shards, draws)
            if len(hashes):
                yield columns, shards

    def _is_held_out(self, chunk: Chunk) -> np.ndarray | None:
        if chunk.held_out is None and isinstance(self.plan.validation, float):
            return is_validation(chunk.hashes, self.plan.validation)
        return chunk.held_out

    def _stream(self, position: Ints | None) -> Iterator[Arrays]:
        """What has not been read yet; at its end the spool is complete."""
        if self._incoming is None:
            return
        incoming = self._incoming
        skipper = None if position is None else Skipper(position)
        # Not `yield from`: a consumer that leaves early would close what others go on reading.
        while (chunk := next(incoming, None)) is not None:
            arrays, shards = chunk
            if skipper is not None and not (left := skipper.is_left(shards)).all():
                arrays = select(arrays, left)
                if not left.any():
                    continue
            yield arrays
        self._incoming = None
        self._training.seal()
        self._held_out.seal()
        if self._on_sealed is not None:
            assert self.folder is not None
            parts = {"training": self._training, "validation": self._held_out}
            layout = {name: spool.describe() for name, spool in parts.items()}
            told = json.dumps({**layout, "not_finite": self.not_finite})
            (self.folder / LAYOUT).write_text(told)
            self._on_sealed(str(self.folder))

    # -- from the spool -------------------------------------------------------------------------

    def _slices(self, spool: Spool, batch_size: int) -> Iterator[Arrays]:
        for start in range(0, spool.num_rows, batch_size):
            yield spool.slice(start, min(start + batch_size, spool.num_rows))

    def _taken(self, request: BatchRequest) -> Iterator[Arrays]:
        stretches = self._order(request.epoch, request.shuffle).stretches(request.position)
        if self.is_shuffled(request.epoch, request.shuffle):
            stretches = self.ahead(stretches, depth=1)
        batches = cut(({"rows": rows} for rows in stretches), request.batch_size)
        for rows in batches:
            numbers = rows["rows"]
            assert isinstance(numbers, np.ndarray)
            yield self._training.take(numbers)

    def _order(self, epoch: int, shuffle: bool) -> EpochOrder:
        if self.plan.sampling is not None and self._draws is None:
            self.agree_on_draws()
        shuffled = self.is_shuffled(epoch, shuffle)
        return EpochOrder(
            self.plan, self._training, epoch=epoch, shuffled=shuffled, draws=self._draws
        )

    def is_shuffled(self, epoch: int, shuffle: bool) -> bool:
        """Epoch 0 has the order of the stream, unless it is drawn from all rows."""
        return shuffle and (epoch > 0 or self.plan.sampling is not None)

    # -- to tensors -----------------------------------------------------------------------------

    def _deliver(self, chunks: Iterator[Arrays]) -> Iterator[Batch]:
        collator = Collator(self.plan, self.plan.required)
        batches = (collator(arrays) for arrays in chunks)
        if self.device.type == "cpu":
            return batches
        return self.ahead((batch.to(self.device) for batch in batches), depth=2)


class ReadAhead(Iterator[T]):
    """An iterator whose next item can be read before it is asked for.

    Args:
        source: read in order, by one thread.
        timed: entered around each reading ahead, to tell where that time goes.
    """

    def __init__(
        self,
        source: Iterator[T],
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._source, self._timed = source, timed
        self._ahead: list[T] = []  # one item at most

    def advance(self) -> None:
        """Read the next item now, unless that has been done; nothing at the source's end."""
        if self._ahead:
            return
        with self._timed():
            for item in self._source:
                self._ahead.append(item)
                break

    def __next__(self) -> T:
        return self._ahead.pop() if self._ahead else next(self._source)
