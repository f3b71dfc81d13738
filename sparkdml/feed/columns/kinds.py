"""The kinds of columns: a number a row, arrays of one length or of any, vectors, and the rest.

An array of any length can only be read where `collate` is set. Vectors, dense and sparse mixed, are
read as a dense matrix.

Made at the driver, read in workers (see base.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.feed.columns.base import Column, first_null, show_row, spark_column, uneven
from sparkdml.feed.ragged import RaggedArray

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import ArrayType, StructField


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


@dataclass(frozen=True)
class ArrayColumn(Column):
    """A tensor of shape (rows, length, …): all arrays of one level have the same length."""

    depth: int = 1

    kind = "array"

    def for_collate(self) -> Column:
        return RaggedColumn(self.name, self.dtype, self.depth)

    def spark_lengths(self) -> dict[str, tuple[SparkColumn, SparkColumn]]:
        from pyspark.sql import functions as F

        size = F.size(spark_column(self.name))
        return {self.name: (size, size), **self._inner_lengths()}

    def _inner_lengths(self) -> dict[str, tuple[SparkColumn, SparkColumn]]:
        from pyspark.sql import functions as F

        lengths = {}
        value = spark_column(self.name)
        for level in range(1, self.depth):
            sizes = F.transform(value, F.size)
            lengths[self.name + "[]" * level] = F.array_min(sizes), F.array_max(sizes)
            value = F.flatten(value)
        return lengths

    def spark_null_checks(self, field: StructField) -> list[SparkColumn]:
        """Of the row, and inside of its array."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import ArrayType

        checks = super().spark_null_checks(field)
        element, flat, may_be_null = field.dataType, spark_column(self.name), False
        for level in range(self.depth):
            assert isinstance(element, ArrayType)
            may_be_null |= element.containsNull
            if level < self.depth - 1:
                flat, element = F.flatten(flat), element.elementType
        if may_be_null:
            # array_contains is null, not false, if the array has a null and not the number sought:
            # compiled by Spark, unlike `exists`, which would cost as much as the whole shuffle. And
            # flatten is null if an inner array is.
            assert isinstance(element, ArrayType)
            checks.append(F.array_contains(flat, self._rare(element)).isNull())
        return checks

    def _rare(self, innermost: ArrayType) -> SparkColumn:
        """A value that hardly any array has; a null beside it is still found in the stream."""
        from pyspark.sql import functions as F

        if self.dtype == "bool":
            return F.lit(False)
        return F.lit(-1.2345678e-30 if self.is_floating else -101).cast(innermost.elementType)

    def _convert(self, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray | RaggedArray:
        return self._typed(self._unnest(values, batch, self.depth))

    def _unnest(
        self,
        values: pa.Array,
        batch: pa.RecordBatch,
        depth: int,
        row_of: Callable[[int], int] = int,
    ) -> np.ndarray:
        """Nested lists of equal lengths as one array of shape (values, length, …).

        `row_of` tells the row of each of `values`, for the error.
        """
        shape = [len(values)]
        for _ in range(depth):
            lengths = np.diff(values.offsets.to_numpy())
            length = int(lengths[0]) if len(lengths) else 0
            odd = np.flatnonzero(lengths != length)
            if odd.size:
                lists_per_value = max(1, len(lengths) // max(1, shape[0]))
                row = row_of(int(odd[0]) // lists_per_value)
                raise uneven(self.name, int(lengths[odd[0]]), length, show_row(batch, row))
            values = values.flatten()
            if values.null_count:
                elements_per_value = max(1, len(values) // max(1, shape[0]))
                raise self._inner_null(batch, row_of(first_null(values) // elements_per_value))
            shape.append(length)
        array: np.ndarray = values.to_numpy(zero_copy_only=False)
        return array.reshape(shape)

    def _inner_null(self, batch: pa.RecordBatch, row: int) -> DataError:
        return DataError(
            f"column {self.name!r} has a null inside the array in the row {show_row(batch, row)}. "
            "Drop or fill such rows before training"
        )


@dataclass(frozen=True)
class RaggedColumn(ArrayColumn):
    """A `Ragged` for `collate`: rows of any length, whose elements all have one shape."""

    is_ragged = True

    def for_collate(self) -> Column:
        return self

    def spark_lengths(self) -> dict[str, tuple[SparkColumn, SparkColumn]]:
        return self._inner_lengths()

    def _convert(self, values: pa.Array, batch: pa.RecordBatch) -> RaggedArray:
        offsets = values.offsets.to_numpy().astype(np.int64)
        offsets = offsets - offsets[0]

        def row_of(element: int) -> int:
            return int(np.searchsorted(offsets, element, side="right")) - 1

        elements = values.flatten()
        if elements.null_count:
            raise self._inner_null(batch, row_of(first_null(elements)))
        array = self._unnest(elements, batch, self.depth - 1, row_of)
        return RaggedArray(self._typed(array), offsets)


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
