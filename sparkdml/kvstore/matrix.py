"""A matrix on the servers, of which a worker holds some rows at a time: Multiverso's MatrixTable.

With one thing more: rows that a worker holds are counted, and may be limited, so that a program
that must never hold the whole matrix can be shown not to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from sparkdml.errors import ParameterError
from sparkdml.kvstore.pending import Pending
from sparkdml.kvstore.store import KVStore
from sparkdml.server.base import Ticket

Ints = NDArray[np.int64]
Rows = NDArray[np.float32]


class MatrixTable:
    """`num_rows` rows of `width` floats under one key, 0 at first; what is pushed is added.

    Args:
        store: this worker's end of the store.
        name: the key.
        num_rows, width: the shape.
        max_rows_held: how many rows this worker may hold at once; None for any number.
    """

    def __init__(
        self,
        store: KVStore,
        name: str,
        num_rows: int,
        width: int,
        max_rows_held: int | None = None,
    ) -> None:
        for what, value in (("num_rows", num_rows), ("width", width)):
            if value < 1:
                raise ParameterError(what, value, "at least 1")
        if max_rows_held is not None and max_rows_held < 1:
            raise ParameterError("max_rows_held", max_rows_held, "at least 1, or None")
        self.name, self.num_rows, self.width = name, num_rows, width
        self.max_rows_held = max_rows_held
        self.rows_held = 0  # lent to this worker at the moment
        self.most_rows_held = 0  # lent or read, at any moment so far
        self._store = store
        # One zero, seen from everywhere: nobody needs memory for the whole.
        store.init(name, torch.zeros(1, 1).expand(num_rows, width), rows=True)

    def get(self, rows: Ints) -> Rows:
        """These rows, in this order."""
        return self.get_async(rows).wait()

    def get_async(self, rows: Ints) -> Ticket[Rows]:
        self._count(len(rows))
        return Pending(self._store.pull_async(self.name, torch.from_numpy(rows)))

    def add(self, rows: Ints, delta: NDArray[np.floating]) -> None:
        """Returns when the servers have it. A row that comes twice is added twice."""
        self.add_async(rows, delta).wait()

    def add_async(self, rows: Ints, delta: NDArray[np.floating]) -> Ticket[None]:
        if delta.shape != (len(rows), self.width):
            raise ParameterError("delta", delta.shape, f"of the shape ({len(rows)}, {self.width})")
        value = torch.tensor(delta, dtype=torch.float32)
        return self._store.push(self.name, value, torch.from_numpy(rows))

    @contextmanager
    def hold(self, rows: Ints) -> Iterator[Rows]:
        """These rows, to be changed in place; at the end the changes are added on the servers.

        Others may add to the same rows meanwhile: nothing of it is lost. After an exception nothing
        is added.
        """
        before = self.get(rows)
        self.rows_held += len(rows)
        try:
            held = before.copy()
            yield held
            self.add(rows, held - before)
        finally:
            self.rows_held -= len(rows)

    def blocks(self, num_rows: int) -> Iterator[tuple[Ints, Rows]]:
        """The whole matrix, so many rows at a time: to save or to judge it."""
        for start in range(0, self.num_rows, num_rows):
            rows = np.arange(start, min(start + num_rows, self.num_rows), dtype=np.int64)
            yield rows, self.get(rows)

    def _count(self, num_rows: int) -> None:
        held = self.rows_held + num_rows
        if self.max_rows_held is not None and held > self.max_rows_held:
            raise ParameterError(
                "rows",
                f"{num_rows} rows of {self.name} beside {self.rows_held}",
                f"at most {self.max_rows_held} at once",
                "Give rows back first, or raise max_rows_held.",
            )
        self.most_rows_held = max(self.most_rows_held, held)
