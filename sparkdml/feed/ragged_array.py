"""Rows of different lengths as two flat numpy arrays: what the feed moves about and spools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparkdml.feed.order import Ints


class RaggedArray:
    """The elements of all rows one after the other, and where each row begins.

    An element may have a shape of its own: rows of vectors, all of one size, but more or fewer.
    """

    def __init__(self, values: np.ndarray, offsets: Ints) -> None:
        """`offsets` begins with 0 and has one entry more than there are rows."""
        self.values = values
        self.offsets = offsets

    @classmethod
    def of_lengths(cls, values: np.ndarray, lengths: Ints) -> RaggedArray:
        return cls(values, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice | np.ndarray) -> RaggedArray:
        """The rows of a slice as views; those of a mask or of row numbers as a copy."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            offsets = self.offsets[start : stop + 1] if stop >= start else self.offsets[:1]
            return RaggedArray(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        starts, lengths = self.offsets[:-1][rows], self.lengths[rows]
        return RaggedArray.of_lengths(self.values[element_numbers(starts, lengths)], lengths)

    @classmethod
    def concatenate(cls, parts: Sequence[RaggedArray]) -> RaggedArray:
        values = [part.values for part in parts if len(part.values)]
        lengths = np.concatenate([part.lengths for part in parts])
        # A part without any element may not know the shape of one.
        return cls.of_lengths(np.concatenate(values) if values else parts[0].values, lengths)


def element_numbers(starts: Ints, lengths: Ints) -> Ints:
    """The numbers of all elements of some rows, row after row."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)
