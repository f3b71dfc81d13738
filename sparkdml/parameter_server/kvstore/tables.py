"""Tables on a `KVStore`, after Multiverso's: `ArrayTable`, `MatrixTable`, `SparseTable`.

Used in workers, on the thread that has the store. A matrix table counts the rows that a worker
holds, and can limit them, so that tests can prove that a program never holds the whole matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.client.base import Ticket
from sparkdml.parameter_server.kvstore.store import KVStore


class Pending:
    """`wait` gives a numpy array."""

    def __init__(self, ticket: Ticket[Tensor]) -> None:
        self._ticket = ticket

    def wait(self, timeout_seconds: float | None = None) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._ticket.wait(timeout_seconds).numpy()
        return array

    @property
    def done(self) -> bool:
        return self._ticket.done


class ArrayTable:
    """`size` floats under one key, 0 at first; what is pushed is added."""

    def __init__(self, store: KVStore, name: str, size: int) -> None:
        if size < 1:
            raise ParameterError("size", size, "at least 1")
        self.name, self.size = name, size
        self._store = store
        store.init(name, torch.zeros(size))

    def get(self) -> NDArray[np.float32]:
        return self.get_async().wait()

    def get_async(self) -> Ticket[NDArray[np.float32]]:
        return Pending(self._store.pull_async(self.name))

    def add(self, delta: NDArray[np.floating]) -> None:
        """Returns when the servers have it."""
        self.add_async(delta).wait()

    def add_async(self, delta: NDArray[np.floating]) -> Ticket[None]:
        if np.shape(delta) != (self.size,):
            raise ParameterError("delta", np.shape(delta), f"of the shape ({self.size},)")
        return self._store.push(self.name, torch.tensor(delta, dtype=torch.float32))


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
        # One zero, expanded, so that no worker allocates the whole table.
        store.init(name, torch.zeros(1, 1).expand(num_rows, width), rows=True)

    def get(self, rows: Ints) -> Rows:
        """Return these rows, in this order."""
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
        """Yield these rows to change in place; at the end the changes are added on the servers.

        Other workers may add to the same rows meanwhile: nothing is lost. After an exception,
        nothing is added.
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
        """Yield the whole matrix, `rows` rows at a time, to save or evaluate it."""
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
                "Release rows first, or raise max_rows_held.",
            )
        self.most_rows_held = max(self.most_rows_held, held)


class SparseTable:
    """Keys from 0 to `num_keys`, each with `width` floats; zeros are never sent.

    Additions to one key are merged before they are sent, and keys whose sum is 0 are skipped: for
    gradients of bags of words, click logs, histograms.
    """

    def __init__(self, store: KVStore, name: str, num_keys: int, width: int = 1) -> None:
        if num_keys < 1:
            raise ParameterError("num_keys", num_keys, "at least 1")
        self._matrix = MatrixTable(store, name, num_keys, width)
        self.name, self.num_keys, self.width = name, num_keys, width
        self.rows_sent = 0  # of all that this worker has added

    def get(self, keys: Ints) -> Rows:
        """Return a row for each key, in this order; repeated keys are fetched once."""
        unique, places = np.unique(keys, return_inverse=True)
        return self._matrix.get(unique)[places]

    def add(self, keys: Ints, values: NDArray[np.floating]) -> None:
        self.add_async(keys, values).wait()

    def add_async(self, keys: Ints, values: NDArray[np.floating]) -> Ticket[None]:
        if values.shape != (len(keys), self.width):
            raise ParameterError(
                "values", values.shape, f"of the shape ({len(keys)}, {self.width})"
            )
        rows, sums = add_up(keys, values)
        self.rows_sent += len(rows)
        return self._matrix.add_async(rows, sums)


def add_up(keys: Ints, values: NDArray[np.floating]) -> tuple[Ints, Rows]:
    """Each key once, with the sum of its values; without those whose sum is 0."""
    rows, places = np.unique(keys, return_inverse=True)
    sums = np.zeros((len(rows), values.shape[1]), dtype=np.float32)
    np.add.at(sums, places, values)
    moved = sums.any(axis=1)
    return rows[moved], sums[moved]
