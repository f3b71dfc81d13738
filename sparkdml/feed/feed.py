"""The worker's side of the feed: a stream of rows in, batches of tensors out, epoch after epoch.

Epoch 0 is read straight from Spark's stream, in the order of the rows' hashes (which is a shuffle
in itself, and depends on the seed), while the rows are spooled to local disk. Later epochs are read
from the spool, shuffled. Memory stays bounded by a few chunks of the stream and one window's row
numbers, however large the partition is.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from sparkdml.feed.batch import Batch
from sparkdml.feed.columns import Column
from sparkdml.feed.order import Ints, shard_of, window_order, windows
from sparkdml.feed.position import (
    Skipper,
    advance_in_order,
    advance_shuffled,
    nothing_read,
)
from sparkdml.feed.prefetch import Prefetch
from sparkdml.feed.recycling import Recycler
from sparkdml.feed.spool import Spool

# Arrow's memory is read-only to numpy. Rows from the stream are handed out once and are spooled
# before, so a model that writes into its input harms nobody.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ")

Arrays = dict[str, np.ndarray]

T = TypeVar("T")

KEPT_PREFIX = "sparkdml-spool-"
LAYOUT = "layout.json"  # written last: a folder that has it is whole


@dataclass(frozen=True)
class Chunk:
    """Some rows on their way in: as arrays, with the hashes that place them."""

    columns: Arrays
    hashes: Ints
    held_out: np.ndarray | None = None  # which rows the validation column marks


@dataclass(frozen=True)
class FeedPlan:
    """What the worker must know to read its rows."""

    columns: tuple[Column, ...]
    seed: int = 0
    validation: float | str | None = None  # a fraction of the rows, or a boolean column
    max_window_rows: int = 1 << 20  # 8 bytes a row for the permutation, three times while sorting
    max_window_bytes: int = 256 << 20  # of the page cache, which a window should fit


def is_validation(hashes: Ints, fraction: float) -> np.ndarray:
    """Which rows a fraction holds out: decided by the low bits, which no shard depends on."""
    return (hashes & 0xFFFFFF) < round(fraction * (1 << 24))


class Feed:
    """The rows that one worker owns. Read the epochs in turn; each row comes once in each."""

    def __init__(
        self,
        source: Iterator[Chunk],
        plan: FeedPlan,
        directory: str,
        device: torch.device | str = "cpu",
        on_sealed: Callable[[str], None] | None = None,
    ) -> None:
        """With `on_sealed` the spool is kept for others, and its folder told once it is whole."""
        self.plan = plan
        self.device = torch.device(device)
        self._on_sealed = on_sealed
        self.folder: Path | None = None
        if on_sealed is not None:
            self.folder = Path(tempfile.mkdtemp(prefix=KEPT_PREFIX, dir=directory))
        self._training = Spool(directory, self.folder and self.folder / "training")
        self._held_out = Spool(directory, self.folder and self.folder / "validation")
        self._incoming: Prefetch[tuple[Arrays, Ints]] | None = Prefetch(self._receive(source))
        self._streamed = False
        self._readers: list[Prefetch[Any]] = []

    @classmethod
    def reopen(cls, folder: str, plan: FeedPlan, device: torch.device | str = "cpu") -> Feed:
        """The rows that a worker before this one has spooled."""
        feed = cls(iter(()), plan, folder, device)
        feed.ingest()
        description = json.loads(Path(folder, LAYOUT).read_text())
        feed.folder = Path(folder)
        feed._training = Spool.reopen(feed.folder / "training", description["training"])
        feed._held_out = Spool.reopen(feed.folder / "validation", description["validation"])
        return feed

    # -- what users read ------------------------------------------------------------------------

    def batches(
        self,
        batch_size: int,
        epoch: int = 0,
        shuffle: bool = True,
        position: Ints | None = None,
    ) -> Iterator[Batch]:
        """One epoch of this worker's training rows, or what lies behind `position` in it.

        The last batch may be short.
        """
        if epoch == 0 and self._incoming is not None and not self._streamed:
            self._streamed = True
            return self._deliver(_cut(self._stream(position), batch_size))
        self.ingest()
        if epoch == 0 or not shuffle:
            return self._deliver(self._in_order(self._training, batch_size, position))
        return self._deliver(self._shuffled(batch_size, epoch, position))

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out rows, always in the same order."""
        self.ingest()
        return self._deliver(self._in_order(self._held_out, batch_size))

    def position_after(
        self, num_rows: int, epoch: int, shuffle: bool = True, position: Ints | None = None
    ) -> Ints:
        """Where an epoch stands once `num_rows` rows behind `position` have been used.

        Costs up to one sort of a window, and may be called from another thread.
        """
        start = nothing_read() if position is None else position
        shards, counts = self._training.layout()
        if epoch == 0 or not shuffle:
            return advance_in_order(start, shards, counts, num_rows)
        chosen = list(self._windows(epoch))
        return advance_shuffled(
            start,
            ((shards[window], counts[window]) for window in chosen),
            num_rows,
            lambda index: shards[self._shard_indices(self._order(epoch, chosen[index]))],
        )

    @property
    def num_rows(self) -> int:
        """How many training rows this worker owns. Reads the rest of the stream first."""
        self.ingest()
        return self._training.num_rows

    @property
    def num_validation_rows(self) -> int:
        self.ingest()
        return self._held_out.num_rows

    def ingest(self) -> None:
        """Read what is left of the stream into the spool."""
        for _ in self._stream(None):
            pass

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
            hashes, columns = chunk.hashes, chunk.columns
            held_out = self._is_held_out(chunk)
            if held_out is not None:
                self._held_out.append(_select(columns, held_out), shard_of(hashes[held_out]))
                hashes, columns = hashes[~held_out], _select(columns, ~held_out)
            shards = shard_of(hashes)
            self._training.append(columns, shards)
            if len(hashes):
                yield columns, shards

    def _is_held_out(self, chunk: Chunk) -> np.ndarray | None:
        if isinstance(self.plan.validation, float):
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
                arrays = _select(arrays, left)
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
            (self.folder / LAYOUT).write_text(json.dumps(layout))
            self._on_sealed(str(self.folder))

    # -- from the spool -------------------------------------------------------------------------

    def _in_order(
        self, spool: Spool, batch_size: int, position: Ints | None = None
    ) -> Iterator[Arrays]:
        if position is not None:
            yield from self._in_order_behind(spool, batch_size, position)
            return
        for start in range(0, spool.num_rows, batch_size):
            yield spool.slice(start, min(start + batch_size, spool.num_rows))

    def _in_order_behind(self, spool: Spool, batch_size: int, position: Ints) -> Iterator[Arrays]:
        shards, counts = spool.layout()
        starts = np.cumsum(counts) - counts
        stretches = (
            {"rows": np.arange(start + min(done, count), start + count)}
            for start, count, done in zip(starts, counts, position[shards], strict=True)
            if done < count
        )
        for rows in _cut(stretches, batch_size):
            yield spool.take(rows["rows"])

    def _shuffled(
        self, batch_size: int, epoch: int, position: Ints | None = None
    ) -> Iterator[Arrays]:
        orders = self._ahead(self._orders(epoch, position), depth=1)
        for rows in _cut(({"rows": order} for order in orders), batch_size):
            yield self._training.take(rows["rows"])

    def _orders(self, epoch: int, position: Ints | None) -> Iterator[Ints]:
        shards, _ = self._training.layout()
        skipper = None if position is None else Skipper(position)
        for window in self._windows(epoch):
            order = self._order(epoch, window)
            if skipper is not None:
                order = order[skipper.is_left(shards[self._shard_indices(order)])]
            if len(order):
                yield order

    def _windows(self, epoch: int) -> Iterator[np.ndarray]:
        shards, counts = self._training.layout()
        by_bytes = self.plan.max_window_bytes // max(1, self._training.row_bytes)
        max_rows = max(1, min(self.plan.max_window_rows, by_bytes))
        return windows(self.plan.seed, epoch, shards, counts, max_rows)

    def _order(self, epoch: int, window: np.ndarray) -> Ints:
        shards, counts = self._training.layout()
        starts = np.cumsum(counts) - counts
        return window_order(self.plan.seed, epoch, shards, starts, counts, window)

    def _shard_indices(self, rows: Ints) -> np.ndarray:
        """Which of the spool's shards each row number lies in."""
        _, counts = self._training.layout()
        return np.searchsorted(np.cumsum(counts), rows, side="right")

    # -- to tensors -----------------------------------------------------------------------------

    def _deliver(self, chunks: Iterator[Arrays]) -> Iterator[Batch]:
        recyclers: defaultdict[str, Recycler] = defaultdict(Recycler)
        batches = (_tensors(arrays, recyclers) for arrays in chunks)
        if self.device.type == "cpu":
            return batches
        return self._ahead((batch.to(self.device) for batch in batches), depth=2)

    def _ahead(self, items: Iterator[T], depth: int) -> Prefetch[T]:
        """Read ahead on a thread, which ends with the feed if its reader leaves early."""
        self._readers = [reader for reader in self._readers if not reader.is_over]
        self._readers.append(Prefetch(items, depth=depth))
        return self._readers[-1]


def _select(columns: Arrays, mask: np.ndarray) -> Arrays:
    return {name: values[mask] for name, values in columns.items()}


def _tensors(arrays: Arrays, recyclers: Mapping[str, Recycler]) -> Batch:
    columns = {
        name: torch.from_numpy(recyclers[name].aligned(values)) for name, values in arrays.items()
    }
    return Batch(columns, len(next(iter(arrays.values()))))


def _cut(chunks: Iterator[Arrays], batch_size: int) -> Iterator[Arrays]:
    """Chunks of any length cut into batches of `batch_size` rows; only the last may be short."""
    rest: list[Arrays] = []
    num_rest = 0
    for chunk in chunks:
        length = len(next(iter(chunk.values())))
        start = 0
        if num_rest:
            start = min(batch_size - num_rest, length)
            rest.append({name: values[:start] for name, values in chunk.items()})
            num_rest += start
            if num_rest < batch_size:
                continue
            yield _join(rest)
            rest, num_rest = [], 0
        while start + batch_size <= length:
            yield {name: values[start : start + batch_size] for name, values in chunk.items()}
            start += batch_size
        if start < length:
            rest, num_rest = (
                [{name: values[start:] for name, values in chunk.items()}],
                length - start,
            )
    if num_rest:
        yield _join(rest)


def _join(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
