"""A client's cache of what it has read: for reads within the bound, and for filters. Pure.

A client reads its own writes: an update that adds is also added to the cached values; after any
other push the table is read from the servers again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkdml.parameter_server.consistency import Consistency
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.partition import Indexes, Table


@dataclass
class Seen:
    """Rows of a table as they were read; `rows` None: all."""

    rows: Indexes | None
    matrix: Tensor
    stamp: int
    fresh: bool = True  # whether it has all of this worker's own pushes in it

    def values_of(self, rows: Indexes) -> Tensor:
        """Rows that were not read count as zeros."""
        if self.rows is None:
            return self.matrix[torch.from_numpy(rows)]
        where = np.searchsorted(self.rows, rows).clip(max=max(0, len(self.rows) - 1))
        known = torch.from_numpy(self.rows[where] == rows) if len(self.rows) else None
        if known is None:
            return torch.zeros((len(rows), self.matrix.shape[1]), dtype=self.matrix.dtype)
        return self.matrix[torch.from_numpy(where)] * known[:, None]


class ReadCache:
    """Of one client; the caller holds the client's lock."""

    def __init__(self, consistency: Consistency) -> None:
        self._consistency = consistency
        self.keep_values = consistency.caches
        self._seen: dict[str, Seen] = {}
        self._stamps: dict[str, int] = {}  # of whole tables: where the slowest was, then
        self._under_way: dict[str, object] = {}  # the last read that began after the last push

    def begin(self, table: Table, read: object) -> None:
        self._under_way[table.name] = read

    def read(
        self, table: Table, rows: Indexes | None, out: Tensor, stamp: int, read: object
    ) -> None:
        """Store a finished read. It counts as fresh if nothing was pushed since it began."""
        if rows is None:
            self._stamps[table.name] = stamp
        if not self.keep_values:
            return
        matrix = out.detach().reshape(-1, table.width)
        if rows is None:
            fresh = self._under_way.get(table.name) is read
            self._seen[table.name] = Seen(None, matrix.clone(), stamp, fresh)
        else:
            named, first = np.unique(rows, return_index=True)
            chosen = matrix[torch.from_numpy(first)]
            self._seen[table.name] = Seen(named, chosen, stamp, fresh=False)

    def reuse(self, table: Table, clock: int, out: Tensor) -> bool:
        """Fill `out` from what was read before, if that is allowed."""
        seen = self._seen.get(table.name)
        if not self._consistency.caches or seen is None or seen.rows is not None or not seen.fresh:
            return False
        if not self._consistency.may_reuse(seen.stamp, clock):
            return False
        out.detach().view(-1, table.width).copy_(seen.matrix)
        return True

    def pushed(self, table: Table, value: Tensor, rows: Indexes | None, updater: Updater) -> None:
        self._under_way.pop(table.name, None)
        seen = self._seen.get(table.name)
        if seen is None or not self._consistency.caches:
            return
        if not updater.additive or seen.rows is not None:
            seen.fresh = False
        elif rows is None:
            seen.matrix += value.reshape(-1, table.width)
        else:
            update = value.reshape(len(rows), table.width)
            seen.matrix.index_add_(0, torch.from_numpy(rows), update)

    def last(self, table: Table) -> Seen | None:
        return self._seen.get(table.name)

    def stamp(self, table: Table) -> int | None:
        """The stamp of the last read of a whole table."""
        return self._stamps.get(table.name)

    def forget(self, table: Table) -> None:
        self._seen.pop(table.name, None)
        self._under_way.pop(table.name, None)

    def forget_all(self) -> None:
        self._seen.clear()
        self._stamps.clear()
        self._under_way.clear()
