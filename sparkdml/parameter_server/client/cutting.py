"""Divides tensors into the parts of a table, and assembles them again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.partition import Indexes, Table
from sparkdml.parameter_server.wire.frames import Entry, rows_tensor


def check_shape(table: Table, value: Tensor) -> None:
    if value.shape != table.shape:
        raise ParameterError(
            "value", f"of shape {tuple(value.shape)}", f"of the table's shape {table.shape}"
        )


def parts_of(table: Table, value: Tensor, parts: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
    """Parts and their values, flat: views of a contiguous tensor, else a copy at a time."""
    rows = value if table.by_row else value.reshape(-1)
    for part in parts:
        start, stop = table.range(part)
        yield part, rows[start:stop].reshape(-1).contiguous()


def cut_whole(table: Table, value: Tensor) -> list[Entry]:
    check_shape(table, value)
    return [
        Entry(table.number, part, values=values)
        for part, values in parts_of(table, value, range(table.num_parts))
    ]


def add_up_rows(table: Table, value: Tensor, rows: Indexes) -> tuple[Indexes, Tensor]:
    """Return each row once, in ascending order, with the sum of its values."""
    if not table.by_row:
        raise ParameterError("rows", "given", "None, as the table was made without rows")
    if value.shape != (len(rows), *table.shape[1:]):
        raise ParameterError(
            "value",
            f"of shape {tuple(value.shape)}",
            f"of shape {(len(rows), *table.shape[1:])}, one for each row",
        )
    named, inverse = np.unique(rows, return_inverse=True)
    matrix = value.reshape(len(rows), table.width)
    if len(named) == len(rows):
        return named, matrix[torch.from_numpy(np.argsort(inverse))]
    total = torch.zeros((len(named), table.width), dtype=table.dtype)
    return named, total.index_add_(0, torch.from_numpy(inverse), matrix)


def cut_rows(table: Table, named: Indexes, matrix: Tensor, all_parts: bool) -> list[Entry]:
    """Return entries for the parts that have some of the rows, or for all parts."""
    entries = {}
    for part, stretch in table.split_rows(named):
        start = table.range(part)[0]
        rows = rows_tensor(named[stretch] - start)
        values = matrix[stretch].reshape(-1)
        entries[part] = Entry(table.number, part, rows=rows, values=values)
    if all_parts:
        nothing = torch.empty(0, dtype=torch.int32)
        for part in range(table.num_parts):
            entries.setdefault(part, Entry(table.number, part, rows=nothing))
    return list(entries.values())


class Gathering:
    """The result of a pull: a tensor of the table's shape, or of the requested rows."""

    def __init__(self, table: Table, wanted: Indexes | None, out: Tensor | None) -> None:
        self.entries: list[Entry] = []
        self._places: list[slice | tuple[Tensor, Tensor]] = []
        shape = table.shape if wanted is None else (len(wanted), *table.shape[1:])
        if wanted is None:
            for part in range(table.num_parts):
                self.entries.append(Entry(table.number, part))
                self._places.append(slice(*table.range(part)))
        else:
            self._place_rows(table, wanted)
        if out is None:
            out = torch.empty(shape, dtype=table.dtype)
        elif out.shape != shape or out.dtype != table.dtype or not out.is_contiguous():
            raise ParameterError(
                "out", f"{tuple(out.shape)} of {out.dtype}", f"contiguous, {shape} of {table.dtype}"
            )
        self.out = out
        self._matrix = out.detach().view(-1, table.width)

    def _place_rows(self, table: Table, wanted: Indexes) -> None:
        if not table.by_row:
            raise ParameterError("rows", "given", "None, as the table was made without rows")
        named, inverse = np.unique(wanted, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        ends = np.cumsum(np.bincount(inverse, minlength=len(named)))
        for part, stretch in table.split_rows(named):
            rows = rows_tensor(named[stretch] - table.range(part)[0])
            self.entries.append(Entry(table.number, part, rows=rows))
            first = ends[stretch.start - 1] if stretch.start else 0
            where = order[first : ends[stretch.stop - 1]]
            chosen = inverse[where] - stretch.start
            self._places.append((torch.from_numpy(where), torch.from_numpy(chosen)))

    def fill(self, index: int, values: Tensor) -> None:
        """Copy the answer to `entries[index]` into the result."""
        matrix, place = self._matrix, self._places[index]
        values = values.view(-1, matrix.shape[1]).to(matrix.dtype)
        if isinstance(place, slice):
            matrix[place] = values
        else:
            matrix[place[0]] = values[place[1]]
