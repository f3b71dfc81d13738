"""A column as the feed reads it: what every kind answers, and how a row looks in a message.

The driver makes columns of a DataFrame's schema (see schema.py) and asks them for Spark
expressions. They are immutable and travel in the FeedPlan; in a worker, the thread that reads the
stream asks them to turn Arrow into arrays, and so does every task of `transform`.

Types are kept: an int64 id stays an int64 id, whatever its size. Only floating-point columns may be
cast, and only where the caller names the type (an estimator asks for its module's own).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.feed.ragged import RaggedArray

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import StructField


@dataclass(frozen=True)
class Column(ABC):
    """One column of the DataFrame. A subclass for each kind says what differs."""

    name: str
    dtype: str  # numpy's name of the tensor's type
    depth: int = 0  # dimensions of one row: of a scalar 0, of array<array<float>> 2

    kind: ClassVar[str]  # the name in messages and saved models
    is_ragged: ClassVar[bool] = False  # whether rows may differ in length
    is_fed: ClassVar[bool] = True  # False: only preprocess can read it
    is_sort_key: ClassVar[bool] = True  # whether it may order rows with equal hashes

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith("float")

    def cast(self, floating: str) -> Column:
        """The same column with another floating-point type; other types are never changed."""
        return replace(self, dtype=floating) if self.is_floating else self

    def for_collate(self) -> Column:
        """The same column where `collate` makes the tensors, of rows of any length."""
        return self

    def outside_spark(self) -> Column:
        """The same column of rows that never were in Spark."""
        return self

    # At the driver.

    def spark_value(self) -> SparkColumn:
        """What Spark selects, hashes and sends."""
        return spark_column(self.name)

    def spark_lengths(self) -> dict[str, tuple[SparkColumn, SparkColumn]]:
        """The shortest and the longest list of each row, by level that must be of one length."""
        return {}

    def spark_null_checks(self, field: StructField) -> list[SparkColumn]:
        """Whether a row has a null here; none where the schema excludes it."""
        return [spark_column(self.name).isNull()] if field.nullable else []

    # In a worker.

    def read(self, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray | RaggedArray:
        """The Arrow column, by rows, without a copy where that is possible.

        A row that can't be fed raises a DataError that shows it, as `batch` has it.
        """
        if values.null_count:
            row = first_null(values)
            raise DataError(
                f"column {self.name!r} is null in the row {show_row(batch, row)}. Drop such rows "
                f"or fill them: df.na.drop(subset=[{self.name!r}])"
            )
        return self._convert(values, batch)

    def for_preprocess(self, values: pa.Array, batch: pa.RecordBatch) -> pa.Array:
        """The Arrow column as the user's function is given it."""
        return values

    @abstractmethod
    def _convert(self, values: pa.Array, batch: pa.RecordBatch) -> np.ndarray | RaggedArray:
        """The values, none of which is null."""

    def _typed(self, array: np.ndarray) -> np.ndarray:
        return array if array.dtype == self.dtype else array.astype(self.dtype)

    # In messages and files.

    def record(self) -> dict[str, Any]:
        """As a saved model's JSON has it; schema.recorded_column reads it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "depth": self.depth,
            "ragged": self.is_ragged,
        }

    def __str__(self) -> str:
        depth = f" (depth {self.depth})" if self.depth > 1 else ""
        return f"{self.kind} of {self.dtype}{depth}"


def quoted(name: str) -> str:
    """A column's name for Spark, which would take a dot in it for a field of a struct."""
    return "`" + name.replace("`", "``") + "`"


def spark_column(name: str) -> SparkColumn:
    from pyspark.sql import functions as F

    return F.col(quoted(name))


def first_null(values: pa.Array) -> int:
    return int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])


def uneven(name: str, got: int, expected: int, row: str) -> DataError:
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
