"""A batch of rows as tensors, the arrays that it is made of, and the memory that these lie in.

Arrays are chosen, cut and joined by rows: pure functions, in workers and in tasks of `transform`,
on any thread. A Recycler belongs to one thread.

A fresh array of a batch's size comes from the kernel page by page, which takes three times as long
as filling it; so a worker uses an array again once nothing holds the batch any more. Arrays and the
tensors that view them hold references, so the count of references says when one is free.

All of it is aligned: matrix products choose their instructions by the alignment of their input, and
their last bits with them. A run that is resumed must not depend on where its batches happen to lie.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdml.feed.plan import Arrays
from sparkdml.feed.ragged import RaggedArray

ALIGNMENT_BYTES = 64  # of torch's own memory
KEPT = 4  # the batch in use, the one before it in the caller's hands, and some that lie ahead
_FREE = 3  # references to an array that only we hold: the list's, the loop's, the call's


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
    return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype).numpy()


def is_aligned(array: np.ndarray) -> bool:
    address: int = array.__array_interface__["data"][0]
    return not address % ALIGNMENT_BYTES


class Recycler:
    """Arrays of one shape and type at a time."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
        """An aligned array with any content, which nothing else holds."""
        if self._arrays and (self._arrays[0].shape != shape or self._arrays[0].dtype != dtype):
            return aligned_empty(shape, dtype)  # the last, short batch of an epoch
        for array in self._arrays:
            if sys.getrefcount(array) <= _FREE:
                return array
        made = aligned_empty(shape, dtype)
        if len(self._arrays) < KEPT:
            self._arrays.append(made)
        return made

    def aligned(self, array: np.ndarray) -> np.ndarray:
        """The array itself, or a copy that is aligned."""
        if is_aligned(array):
            return array
        copy = self.array(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy


class Batch(Mapping[str, Tensor]):
    """Tensors by column name; the first dimension of each is the row.

    A batch may be empty: ranks whose rows are used up take part in the last steps with nothing.
    """

    def __init__(self, columns: dict[str, Tensor], num_rows: int) -> None:
        self._columns = columns
        self.num_rows = num_rows

    @classmethod
    def empty(cls) -> Batch:
        return cls({}, 0)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._columns[name]
        except KeyError:
            have = ", ".join(self._columns) or "none: it is empty"
            raise KeyError(f"no column {name!r} in this batch, which has {have}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def split(self, rows: int) -> Iterator[Batch]:
        """Pieces of at most `rows` rows, as views."""
        if self.num_rows <= rows:
            yield self
            return
        for start in range(0, self.num_rows, rows):
            yield self.between(start, min(start + rows, self.num_rows))

    def split_evenly(self, num_pieces: int) -> Iterator[Batch]:
        """Yield `num_pieces` pieces, as views, whose lengths differ by at most one row."""
        if num_pieces <= 1:
            yield self
            return
        share, rest = divmod(self.num_rows, num_pieces)
        start = 0
        for index in range(num_pieces):
            stop = start + share + (index < rest)
            yield self.between(start, stop)
            start = stop

    def between(self, start: int, stop: int) -> Batch:
        """Some of the rows, as a view."""
        columns = {name: tensor[start:stop] for name, tensor in self._columns.items()}
        return Batch(columns, stop - start)

    def to(self, device: torch.device) -> Batch:
        """On the device, by way of pinned memory so that the copy runs beside the computation."""
        columns = {
            name: tensor.pin_memory().to(device, non_blocking=True)
            for name, tensor in self._columns.items()
        }
        return Batch(columns, self.num_rows)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in self._columns.items())
        return f"Batch({self.num_rows} rows: {shapes})"


def num_rows_of(columns: Arrays) -> int:
    return len(next(iter(columns.values())))


def select(columns: Arrays, mask: np.ndarray) -> Arrays:
    return {name: values[mask] for name, values in columns.items()}


def cut(chunks: Iterator[Arrays], batch_size: int) -> Iterator[Arrays]:
    """Chunks of any length cut into batches of `batch_size` rows; only the last may be short."""
    rest: list[Arrays] = []
    num_rest = 0
    for chunk in chunks:
        length = num_rows_of(chunk)
        start = 0
        if num_rest:
            start = min(batch_size - num_rest, length)
            rest.append({name: values[:start] for name, values in chunk.items()})
            num_rest += start
            if num_rest < batch_size:
                continue
            yield join(rest)
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
        yield join(rest)


def join(parts: list[Arrays]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}


def _concatenate(parts: list[Any]) -> np.ndarray | RaggedArray:
    if isinstance(parts[0], RaggedArray):
        return RaggedArray.concatenate(parts)
    return np.concatenate(parts)


def without_short(batches: Iterator[Arrays], batch_size: int) -> Iterator[Arrays]:
    """Only batches of full size."""
    return (arrays for arrays in batches if num_rows_of(arrays) == batch_size)


def count_not_finite(values: np.ndarray | RaggedArray) -> int:
    """How many rows have a NaN or an infinity."""
    content = values.values if isinstance(values, RaggedArray) else values
    if content.dtype.kind != "f":
        return 0
    wrong = ~np.isfinite(content)
    if not wrong.any():
        return 0
    if isinstance(values, RaggedArray):
        elements = np.flatnonzero(wrong.reshape(len(content), -1).any(axis=1))
        return len(np.unique(np.searchsorted(values.offsets, elements, side="right")))
    return int(wrong.reshape(len(values), -1).any(axis=1).sum())
