"""Vectors of Spark ML, dense and sparse mixed: read as a dense matrix.

Made at the driver, read in workers (see base.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdml.feed.columns.array import ArrayColumn
from sparkdml.feed.columns.base import Column, show_row, spark_column, uneven

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn


@dataclass(frozen=True)
class VectorColumn(Column):
    """A tensor of shape (rows, size)."""

    dtype: str = "float64"
    depth: int = 1

    kind = "vector"
    is_sort_key = False

    def outside_spark(self) -> Column:
        """A list of numbers: vectors are Spark's own."""
        return ArrayColumn(self.name, self.dtype)

    def spark_value(self) -> SparkColumn:
        """The struct that holds it, which Spark can hash and Arrow has a type for."""
        from pyspark.sql import functions as F

        return F.unwrap_udt(super().spark_value())

    def spark_lengths(self) -> dict[str, tuple[SparkColumn, SparkColumn]]:
        from pyspark.sql import functions as F

        value = spark_column(self.name)
        size = F.coalesce(value["size"], F.size(value["values"]))
        return {self.name: (size, size)}

    def for_preprocess(self, values: pa.Array, batch: pa.RecordBatch) -> pa.Array:
        """Lists of numbers."""
        if not is_vectors(values):
            return values
        matrix = self.read(values, batch)
        assert isinstance(matrix, np.ndarray)
        return pa.FixedSizeListArray.from_arrays(matrix.reshape(-1), matrix.shape[1])

    def _convert(self, values: pa.StructArray, batch: pa.RecordBatch) -> np.ndarray:
        return self._typed(self._matrix(values, batch))

    def _matrix(self, values: pa.StructArray, batch: pa.RecordBatch) -> np.ndarray:
        dense = values.field("type").to_numpy() == 1
        lists = values.field("values")
        lengths = np.diff(lists.offsets.to_numpy())
        sizes = np.where(dense, lengths, values.field("size").fill_null(0).to_numpy())
        size = int(sizes[0]) if len(sizes) else 0
        odd = np.flatnonzero(sizes != size)
        if odd.size:
            raise uneven(self.name, int(sizes[odd[0]]), size, show_row(batch, int(odd[0])))
        numbers: np.ndarray = lists.flatten().to_numpy(zero_copy_only=False)
        if dense.all():
            return numbers.reshape(len(sizes), size)
        rows = np.repeat(np.arange(len(sizes)), lengths)
        # A dense row's values stand at 0, 1, 2, …; a sparse row's at its indices.
        starts = np.cumsum(lengths) - lengths
        places = np.arange(len(numbers)) - np.repeat(starts, lengths)
        indices = values.field("indices").flatten().to_numpy(zero_copy_only=False)
        places[~dense[rows]] = indices
        matrix = np.zeros((len(sizes), size), dtype=self.dtype)
        matrix[rows, places] = numbers
        return matrix


def is_vectors(values: pa.Array) -> bool:
    """Whether an Arrow array has the struct of Spark's vectors."""
    return bool(pa.types.is_struct(values.type)) and values.type.get_field_index("indices") >= 0


def vectors_to_python(values: pa.Array) -> list[Any]:
    """Dense vectors as lists of numbers; any other Arrow array as Python has it."""
    plain: list[Any] = (values.field("values") if is_vectors(values) else values).to_pylist()
    return plain
