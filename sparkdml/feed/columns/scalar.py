"""A number or a boolean a row, and a value that no tensor can hold: the kinds without a length.

Made at the driver, read in workers (see base.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparkdml.feed.columns.base import Column


@dataclass(frozen=True)
class ScalarColumn(Column):
    """A tensor of shape (rows,)."""

    kind = "scalar"

    def _convert(self, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray:
        return self._typed(values.to_numpy(zero_copy_only=False))


@dataclass(frozen=True)
class OpaqueColumn(Column):
    """Text, bytes, a date, a struct: only `preprocess` can read it, as Arrow has it."""

    dtype: str = "object"

    kind = "other"
    is_fed = False

    def _convert(self, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray:
        raise AssertionError(f"column {self.name!r} can be read by preprocess alone")
