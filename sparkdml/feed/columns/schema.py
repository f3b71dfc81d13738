"""Which kind each column of a DataFrame's schema is, and what to do about those that are none.

Runs at the driver, on the caller's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdml.errors import DataError
from sparkdml.feed.columns.base import Column
from sparkdml.feed.columns.kinds import (
    ArrayColumn,
    OpaqueColumn,
    RaggedColumn,
    ScalarColumn,
    VectorColumn,
)

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

NUMPY_TYPES = {
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

_RECORDED = {
    (kind.kind, kind.is_ragged): kind
    for kind in (ScalarColumn, ArrayColumn, RaggedColumn, VectorColumn, OpaqueColumn)
}


def describe_columns(schema: StructType, names: list[str]) -> list[Column]:
    """The columns to feed, or a DataError that says what to do about those that can't be fed."""
    known = {field.name: field.dataType for field in schema.fields}
    columns = []
    for name in names:
        if name not in known:
            raise DataError(f"no column {name!r}: the DataFrame has {', '.join(known) or 'none'}")
        columns.append(_describe(name, known[name]))
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
            columns.append(OpaqueColumn(name))
    return columns


def recorded_column(record: dict[str, Any]) -> Column:
    """The column that a saved model's JSON describes: see Column.record."""
    kind = _RECORDED[record["kind"], record.get("ragged", False)]
    return kind(record["name"], record["dtype"], record.get("depth", 0))


def _describe(name: str, kind: DataType) -> Column:
    from pyspark.sql.types import ArrayType, UserDefinedType

    if isinstance(kind, UserDefinedType):
        if kind.simpleString() == VectorColumn.kind:
            return VectorColumn(name)
        raise DataError(f"column {name!r} has the type {kind.simpleString()}, which can't be fed")
    depth, element = 0, kind
    while isinstance(element, ArrayType):
        depth, element = depth + 1, element.elementType
    simple = element.simpleString()
    if simple not in NUMPY_TYPES:
        fix = _FIXES.get(simple.split("<")[0].split("(")[0], "convert it to numbers first")
        raise DataError(
            f"column {name!r} has the type {kind.simpleString()}, which no tensor has: {fix}"
        )
    dtype = NUMPY_TYPES[simple]
    return ArrayColumn(name, dtype, depth) if depth else ScalarColumn(name, dtype)
