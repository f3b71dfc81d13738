"""Rows column by column, chosen, cut into batches and joined: pure functions over arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sparkdml.feed.plan import Arrays
from sparkdml.feed.ragged_array import RaggedArray


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
