"""Rows of different lengths: as numpy arrays in the feed, as tensors for `collate`, and `pad`.

`RaggedArray` is what the feed reads, moves and spools; `Ragged` is the same for the user's
function. Both are plain values, in workers and in tasks of `transform`, on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdml.errors import ParameterError
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


Columns = Mapping[str, "Tensor | Ragged"]


class Ragged:
    """A column whose rows differ in length.

    Attributes:
        values: the elements of all rows, one after the other.
        offsets: where each row begins in `values`, and at last where the last one ends: what
            `nn.EmbeddingBag(…, include_last_offset=True)` takes.
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self.values = values
        self.offsets = offsets

    @property
    def lengths(self) -> Tensor:
        """How many elements each row has."""
        return self.offsets.diff()

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def __len__(self) -> int:
        return self.num_rows

    def rows(self) -> list[Tensor]:
        """Each row as a tensor of its own: views, for instance for `pack_sequence`."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows())

    def pad(self, value: float = 0, length: int | None = None) -> Tensor:
        """One tensor of shape (rows, length, …), with `value` behind the shorter rows.

        Without `length` it is as long as the longest row; longer rows are cut.
        """
        lengths = self.lengths
        longest = int(lengths.max()) if self.num_rows else 0
        if length is None:
            length = longest
        shape = (self.num_rows, length, *self.values.shape[1:])
        padded = self.values.new_full(shape, value)
        places = torch.arange(length, device=padded.device)
        values = self.values
        if longest > length:
            starts = torch.repeat_interleave(self.offsets[:-1], lengths)
            kept = torch.arange(len(values), device=values.device) - starts < length
            values = values[kept]
        padded[places < lengths[:, None]] = values
        return padded

    def __repr__(self) -> str:
        inner = "".join(f", {size}" for size in self.values.shape[1:])
        return f"Ragged({self.num_rows} rows of any length{inner}, {self.values.dtype})"


class pad:  # used like a function: collate=dml.pad(value=0)
    """For `collate=`: every ragged column padded to the longest row of the batch.

    Beside each padded column `x` comes `x_length` with the true lengths, which may be fed to the
    model too: `featuresCol=["tokens", "tokens_length"]`.

    Args:
        value: what stands behind the shorter rows; a dict gives one for each column by name.
        max_length: rows are cut to it; the lengths, too. None keeps them whole.
    """

    def __init__(
        self, value: float | Mapping[str, float] = 0, max_length: int | None = None
    ) -> None:
        if max_length is not None and (
            isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1
        ):
            raise ParameterError("max_length", max_length, "a whole number of at least 1, or None")
        values = list(value.values()) if isinstance(value, Mapping) else [value]
        if not all(isinstance(v, int | float) for v in values):
            raise ParameterError("value", value, "a number, or a dict of a number for each column")
        self.value = dict(value) if isinstance(value, Mapping) else value
        self.max_length = max_length

    def __call__(self, columns: Columns) -> dict[str, Tensor]:
        padded: dict[str, Tensor] = {}
        for name, column in columns.items():
            if not isinstance(column, Ragged):
                padded[name] = column
                continue
            value = self.value.get(name, 0) if isinstance(self.value, dict) else self.value
            lengths = column.lengths
            longest = int(lengths.max()) if len(lengths) else 0
            if self.max_length is not None and longest > self.max_length:
                longest, lengths = self.max_length, lengths.clamp(max=self.max_length)
            padded[name] = column.pad(value, longest)
            padded[f"{name}_length"] = lengths
        return padded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, pad) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"pad(value={self.value!r}, max_length={self.max_length!r})"


Collate = Callable[[dict[str, Any]], Mapping[str, Tensor]]
