"""A batch: some rows, column by column, as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


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
        """So many pieces, as views, that differ by a row at most."""
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
