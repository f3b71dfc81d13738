"""The worker's side of the feed: a stream of rows in, batches of tensors out, epoch after epoch.

Epoch 0 is read straight from Spark's stream, in the order of the rows' hashes (which is a shuffle
in itself, and depends on the seed), while the rows are spooled to local disk. Later epochs are read
from the spool, shuffled. Memory stays bounded by a few chunks of the stream and one window's row
numbers, however large the partition is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sparkdml.feed.batch import Batch
from sparkdml.feed.columns import Column
from sparkdml.feed.order import Ints, shard_of, window_order, windows
from sparkdml.feed.prefetch import Prefetch
from sparkdml.feed.spool import Spool

# Arrow's memory is read-only to numpy. Rows from the stream are handed out once and are spooled
# before, so a model that writes into its input harms nobody.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ")

Arrays = dict[str, np.ndarray]


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
    ) -> None:
        self.plan = plan
        self.device = torch.device(device)
        self._training = Spool(directory)
        self._held_out = Spool(directory)
        self._incoming: Prefetch[Arrays] | None = Prefetch(self._receive(source))
        self._streamed = False

    # -- what users read ------------------------------------------------------------------------

    def batches(self, batch_size: int, epoch: int = 0, shuffle: bool = True) -> Iterator[Batch]:
        """One epoch of this worker's training rows. The last batch may be short."""
        if epoch == 0 and self._incoming is not None and not self._streamed:
            self._streamed = True
            return self._deliver(_cut(self._stream(), batch_size))
        self.ingest()
        if epoch == 0 or not shuffle:
            return self._deliver(self._in_order(self._training, batch_size))
        return self._deliver(self._shuffled(batch_size, epoch))

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The held-out rows, always in the same order."""
        self.ingest()
        return self._deliver(self._in_order(self._held_out, batch_size))

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
        for _ in self._stream():
            pass

    def close(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._training.close()
        self._held_out.close()

    # -- from the stream ------------------------------------------------------------------------

    def _receive(self, chunks: Iterator[Chunk]) -> Iterator[Arrays]:
        """Spool each chunk, then hand out its training rows; runs on the prefetch thread."""
        for chunk in chunks:
            hashes, columns = chunk.hashes, chunk.columns
            held_out = self._is_held_out(chunk)
            if held_out is not None:
                self._held_out.append(_select(columns, held_out), shard_of(hashes[held_out]))
                hashes, columns = hashes[~held_out], _select(columns, ~held_out)
            self._training.append(columns, shard_of(hashes))
            if len(hashes):
                yield columns

    def _is_held_out(self, chunk: Chunk) -> np.ndarray | None:
        if isinstance(self.plan.validation, float):
            return is_validation(chunk.hashes, self.plan.validation)
        return chunk.held_out

    def _stream(self) -> Iterator[Arrays]:
        """What has not been read yet; at its end the spool is complete."""
        if self._incoming is None:
            return
        incoming = self._incoming
        # Not `yield from`: a consumer that leaves early would close what others go on reading.
        while (arrays := next(incoming, None)) is not None:
            yield arrays
        self._incoming = None
        self._training.seal()
        self._held_out.seal()

    # -- from the spool -------------------------------------------------------------------------

    def _in_order(self, spool: Spool, batch_size: int) -> Iterator[Arrays]:
        for start in range(0, spool.num_rows, batch_size):
            yield spool.slice(start, min(start + batch_size, spool.num_rows))

    def _shuffled(self, batch_size: int, epoch: int) -> Iterator[Arrays]:
        orders: Iterator[Ints] = Prefetch(self._orders(epoch), depth=1)
        for rows in _cut(({"rows": order} for order in orders), batch_size):
            yield self._training.take(rows["rows"])

    def _orders(self, epoch: int) -> Iterator[Ints]:
        seed, shards, counts = self.plan.seed, self._training.shards, self._training.counts
        starts = np.cumsum(counts) - counts
        by_bytes = self.plan.max_window_bytes // max(1, self._training.row_bytes)
        max_rows = max(1, min(self.plan.max_window_rows, by_bytes))
        for window in windows(seed, epoch, shards, counts, max_rows):
            yield window_order(seed, epoch, shards, starts, counts, window)

    # -- to tensors -----------------------------------------------------------------------------

    def _deliver(self, chunks: Iterator[Arrays]) -> Iterator[Batch]:
        batches = (_tensors(arrays) for arrays in chunks)
        if self.device.type == "cpu":
            return batches
        return Prefetch(batch.to(self.device) for batch in batches)


def _select(columns: Arrays, mask: np.ndarray) -> Arrays:
    return {name: values[mask] for name, values in columns.items()}


def _tensors(arrays: Arrays) -> Batch:
    columns = {name: torch.from_numpy(values) for name, values in arrays.items()}
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
