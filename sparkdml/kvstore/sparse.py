"""Values under whole numbers, most of them never touched: Multiverso's SparseTable."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkdml.errors import ParameterError
from sparkdml.kvstore.matrix import Ints, MatrixTable, Rows
from sparkdml.kvstore.store import KVStore
from sparkdml.server.base import Ticket


class SparseTable:
    """Keys from 0 to `num_keys`, each with `width` floats; what is 0 never travels.

    Additions to one key are put together before they leave this worker, and keys whose sum is 0
    stay at home: for gradients of bags of words, click logs, histograms.
    """

    def __init__(self, store: KVStore, name: str, num_keys: int, width: int = 1) -> None:
        if num_keys < 1:
            raise ParameterError("num_keys", num_keys, "at least 1")
        self._matrix = MatrixTable(store, name, num_keys, width)
        self.name, self.num_keys, self.width = name, num_keys, width
        self.rows_sent = 0  # of all that this worker has added

    def get(self, keys: Ints) -> Rows:
        """A row for each key, in this order; keys may repeat, and travel once."""
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
