"""Which columns can become tensors, and how: Spark types at the driver, Arrow in the worker.

Types are kept: an int64 id stays an int64 id, whatever its size. Only floating-point columns may be
cast, and only where the caller names the type (an estimator asks for its module's own). Columns of
any other type are read only by a `preprocess` function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.feed.ragged import RaggedArray

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Kind = Literal["scalar", "array", "vector", "other"]

_NUMPY_TYPE = {
    "boolean": "bool",
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
}

_FIXES = {
    "string": "index it first (StringIndexer), turn it into numbers in preprocess=, or leave the "
    "column out",
    "binary": "decode it to an array of numbers first, for instance in preprocess=",
    "date": "turn it into a number first, for instance with datediff",
    "timestamp": "turn it into a number first, for instance with unix_timestamp",
    "timestamp_ntz": "turn it into a number first, for instance with unix_timestamp",
    "decimal": "cast it to double or to bigint",
    "map": "turn it into columns or into an array",
    "struct": "select its fields as columns of their own",
}


@dataclass(frozen=True)
class Column:
    """One column as the worker must read it."""

    name: str
    kind: Kind
    dtype: str  # numpy's name of the tensor's type
    depth: int = 0  # nested arrays: array<float> 1, array<array<float>> 2
    ragged: bool = False  # whether its rows may differ in length

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith("float")

    def cast(self, floating: str) -> Column:
        """The same column with another floating-point type; other types are never changed."""
        return replace(self, dtype=floating) if self.is_floating else self


def describe_columns(schema: StructType, names: list[str]) -> list[Column]:
    """The columns to feed, or a DataError that says what to do about those that can't be fed."""
    known = {field.name: field for field in schema.fields}
    columns = []
    for name in names:
        if name not in known:
            raise DataError(f"no column {name!r}: the DataFrame has {', '.join(known) or 'none'}")
        columns.append(_describe(name, known[name].dataType))
    return columns


def describe_inputs(schema: StructType, names: list[str]) -> list[Column]:
    """The columns that `preprocess` is given: of any type that Spark can hash."""
    known = {field.name: field.dataType for field in schema.fields}
    columns = []
    for name in names:
        if name not in known:
            raise DataError(
                f"no column {name!r} for inputCols=: the DataFrame has {', '.join(known) or 'none'}"
            )
        try:
            columns.append(_describe(name, known[name]))
        except DataError:
            if "map<" in known[name].simpleString():
                raise DataError(
                    f"column {name!r} in inputCols has the type {known[name].simpleString()}, and "
                    "rows are placed by a hash, which Spark has none of for maps: use map_entries"
                ) from None
            columns.append(Column(name, "other", "object"))
    return columns


def _describe(name: str, kind: DataType) -> Column:
    from pyspark.sql.types import ArrayType, UserDefinedType

    if isinstance(kind, UserDefinedType):
        if kind.simpleString() == "vector":
            return Column(name, "vector", "float64", depth=1)
        raise DataError(f"column {name!r} has the type {kind.simpleString()}, which can't be fed")
    depth, element = 0, kind
    while isinstance(element, ArrayType):
        depth, element = depth + 1, element.elementType
    simple = element.simpleString()
    if simple not in _NUMPY_TYPE:
        fix = _FIXES.get(simple.split("<")[0].split("(")[0], "convert it to numbers first")
        raise DataError(
            f"column {name!r} has the type {kind.simpleString()}, which no tensor has: {fix}"
        )
    return Column(name, "array" if depth else "scalar", _NUMPY_TYPE[simple], depth)


def to_values(column: Column, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray | RaggedArray:
    """One Arrow column as the feed moves it."""
    if column.ragged:
        return to_ragged(column, values, batch)
    return to_numpy(column, values, batch)


def to_numpy(column: Column, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray:
    """One Arrow column as an array whose first dimension is the row; without a copy if it can."""
    _refuse_nulls(column, values, batch)
    if column.kind == "vector":
        array = _vectors(column, values, batch)
    else:
        array = _unnest(column, values, batch, column.depth)
    return array if array.dtype == column.dtype else array.astype(column.dtype)


def to_ragged(column: Column, values: pa.Array, batch: pa.RecordBatch) -> RaggedArray:
    """One Arrow column of lists of any length; what is in them has one shape."""
    _refuse_nulls(column, values, batch)
    offsets = values.offsets.to_numpy().astype(np.int64)
    offsets = offsets - offsets[0]

    def row_of(element: int) -> int:
        return int(np.searchsorted(offsets, element, side="right")) - 1

    elements = values.flatten()
    if elements.null_count:
        element = int(np.flatnonzero(elements.is_null().to_numpy(zero_copy_only=False))[0])
        raise _inner_null(column, batch, row_of(element))
    array = _unnest(column, elements, batch=batch, depth=column.depth - 1, row_of=row_of)
    if array.dtype != column.dtype:
        array = array.astype(column.dtype)
    return RaggedArray(array, offsets)


def _refuse_nulls(column: Column, values: pa.Array, batch: pa.RecordBatch) -> None:
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"column {column.name!r} is null in the row {show_row(batch, row)}. Drop such rows or "
            f"fill them: df.na.drop(subset=[{column.name!r}])"
        )


def _inner_null(column: Column, batch: pa.RecordBatch, row: int) -> DataError:
    return DataError(
        f"column {column.name!r} has a null inside the array in the row {show_row(batch, row)}. "
        "Drop or fill such rows before training"
    )


def _unnest(
    column: Column,
    values: pa.Array,
    batch: pa.RecordBatch,
    depth: int,
    row_of: Callable[[int], int] = int,
) -> np.ndarray:
    """Nested lists of equal lengths as one array of shape (values, length, …).

    `row_of` tells the row of each of `values`, for the words of an error.
    """
    shape = [len(values)]
    for _ in range(depth):
        lengths = np.diff(values.offsets.to_numpy())
        length = int(lengths[0]) if len(lengths) else 0
        odd = np.flatnonzero(lengths != length)
        if odd.size:
            lists_per_value = max(1, len(lengths) // max(1, shape[0]))
            row = row_of(int(odd[0]) // lists_per_value)
            raise ragged(column.name, int(lengths[odd[0]]), length, show_row(batch, row))
        values = values.flatten()
        if values.null_count:
            elements_per_value = max(1, len(values) // max(1, shape[0]))
            element = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise _inner_null(column, batch, row_of(element // elements_per_value))
        shape.append(length)
    array: np.ndarray = values.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _vectors(column: Column, values: pa.StructArray, batch: pa.RecordBatch) -> np.ndarray:
    """Spark ML vectors, dense and sparse mixed, as a dense matrix."""
    dense = values.field("type").to_numpy() == 1
    lists = values.field("values")
    lengths = np.diff(lists.offsets.to_numpy())
    sizes = np.where(dense, lengths, values.field("size").fill_null(0).to_numpy())
    size = int(sizes[0]) if len(sizes) else 0
    odd = np.flatnonzero(sizes != size)
    if odd.size:
        raise ragged(column.name, int(sizes[odd[0]]), size, show_row(batch, int(odd[0])))
    numbers: np.ndarray = lists.flatten().to_numpy(zero_copy_only=False)
    if dense.all():
        return numbers.reshape(len(sizes), size)
    rows = np.repeat(np.arange(len(sizes)), lengths)
    # A dense row's values stand at 0, 1, 2, …; a sparse row's at its indices.
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(numbers)) - np.repeat(starts, lengths)
    indices = values.field("indices").flatten().to_numpy(zero_copy_only=False)
    places[~dense[rows]] = indices
    matrix = np.zeros((len(sizes), size), dtype=column.dtype)
    matrix[rows, places] = numbers
    return matrix


def ragged(name: str, got: int, expected: int, row: str) -> DataError:
    return DataError(
        f"column {name!r} has {got} elements in the row {row}, but {expected} in others. Every row "
        "needs the same length: pad or cut the arrays before training, or set collate=dml.pad()"
    )


def show_row(batch: pa.RecordBatch, row: int, limit: int = 300) -> str:
    """A row as a person would want to see it in an error message."""
    return show_values(
        {name: batch.column(name)[row].as_py() for name in batch.schema.names}, limit
    )


def show_values(row: dict[str, Any], limit: int = 300) -> str:
    parts = []
    for name, value in row.items():
        if name.startswith("__sparkdml"):
            continue
        text = f"<{len(value):,} bytes>" if isinstance(value, bytes) else repr(value)
        if isinstance(value, list) and len(value) > 6:
            text = f"[{', '.join(map(repr, value[:4]))}, … {len(value)} elements]"
        parts.append(f"{name}={text}")
    text = ", ".join(parts)
    return "(" + (text if len(text) <= limit else text[:limit] + "…") + ")"
