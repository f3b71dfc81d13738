"""The user's `preprocess`: Arrow rows in, one array a column out, checked on the way.

It runs in the worker, on the thread that reads the stream, once for each row; what it returns is
spooled, so that later epochs pay nothing. In `transform` it runs in each task. It must return as
many rows as it was given, in their order: rows are placed, counted and split before, and transform
needs a prediction for each. A row that can't be used is dropped from the DataFrame beforehand, or
given the weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from sparkdml.errors import DataError
from sparkdml.feed.columns.base import show_row
from sparkdml.feed.columns.kinds import ArrayColumn, RaggedColumn, ScalarColumn
from sparkdml.feed.plan import Arrays, FeedPlan
from sparkdml.feed.ragged import Ragged, RaggedArray

ALLOWED = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]

Signature = dict[str, tuple[str, str]]


class Preprocessor:
    """Applies the function to chunk after chunk, and sees to it that they are all alike."""

    def __init__(self, plan: FeedPlan) -> None:
        assert plan.preprocess is not None
        self._function = plan.preprocess
        self._inputs = plan.inputs
        self._floating = plan.floating
        self._ragged_is_allowed = plan.collate is not None
        self._signature: Signature | None = None

    def __call__(self, batch: pa.RecordBatch) -> Arrays:
        given = self._given(batch)
        arrays = self._convert(self._call(given), given)
        signature = {name: _describe(values) for name, values in arrays.items()}
        if self._signature is None:
            self._signature = signature
        elif signature != self._signature:
            raise _other_types(self._signature, signature, batch.num_rows)
        return arrays

    def _given(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that it asked for and that are there; vectors as lists of numbers."""
        arrays, names = [], []
        for column in self._inputs:
            if column.name not in batch.schema.names:
                continue  # a label, when it is predicted
            arrays.append(column.for_preprocess(batch.column(column.name), batch))
            names.append(column.name)
        return pa.RecordBatch.from_arrays(arrays, names=names)

    def _call(self, given: pa.RecordBatch) -> Mapping[str, Any]:
        try:
            returned = self._function(given)
        except Exception as error:
            culprit, cause = _narrow(self._function, given, error)
            where = (
                f"the row {show_row(culprit, 0)}"
                if culprit.num_rows == 1
                else f"a chunk of {culprit.num_rows:,} rows with the columns "
                f"{', '.join(given.schema.names)}"
            )
            raise DataError(
                f"preprocess failed on {where}: {type(cause).__name__}: {cause}"
            ) from cause
        if not isinstance(returned, Mapping) or not returned:
            raise DataError(
                f"preprocess returned {_name(returned)}; it must return a dict with an array for "
                "each column, whose first dimension is the rows"
            )
        return returned

    def _convert(self, returned: Mapping[str, Any], given: pa.RecordBatch) -> Arrays:
        arrays: Arrays = {}
        for name, values in returned.items():
            array = self._array(name, values, given)
            if len(array) != given.num_rows:
                raise DataError(
                    f"preprocess returned {len(array):,} rows in column {name!r} for "
                    f"{given.num_rows:,} rows that it was given. It must return as many: drop rows "
                    "from the DataFrame before (df.filter), or give them the weight 0 (weightCol)"
                )
            arrays[name] = array
        return arrays

    def _array(self, name: str, values: Any, given: pa.RecordBatch) -> np.ndarray | RaggedArray:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if isinstance(values, pa.Array):
            return self._cast(name, self._from_arrow(name, values, given))
        if isinstance(values, Ragged):
            if not self._ragged_is_allowed:
                raise _ragged_without_collate(name)
            flat, offsets = values.values.detach().cpu(), values.offsets.cpu()
            return self._cast(name, RaggedArray(flat.numpy(), offsets.numpy().astype(np.int64)))
        if isinstance(values, Tensor):
            try:
                values = values.detach().cpu().numpy()
            except TypeError:
                raise _not_allowed(name, str(values.dtype)) from None
        if not isinstance(values, np.ndarray) or values.ndim == 0:
            raise DataError(
                f"preprocess returned {_name(values)} for column {name!r}, not a numpy array, "
                "tensor or Arrow array with a row for each that it was given"
            )
        return self._cast(name, values)

    def _from_arrow(
        self, name: str, values: pa.Array, given: pa.RecordBatch
    ) -> np.ndarray | RaggedArray:
        if pa.types.is_fixed_size_list(values.type) and not values.null_count:
            size = values.type.list_size
            flat = ScalarColumn(name, _numpy_type(name, values.type.value_type))
            elements = flat.read(values.flatten(), given)
            assert isinstance(elements, np.ndarray)
            return elements.reshape(-1, size)
        depth, element = 0, values.type
        while pa.types.is_list(element) or pa.types.is_large_list(element):
            depth, element = depth + 1, element.value_type
        dtype = _numpy_type(name, element)
        if not depth:
            return ScalarColumn(name, dtype).read(values, given)
        kind = RaggedColumn if self._ragged_is_allowed else ArrayColumn
        return kind(name, dtype, depth).read(values, given)

    def _cast(self, name: str, values: np.ndarray | RaggedArray) -> np.ndarray | RaggedArray:
        content = values.values if isinstance(values, RaggedArray) else values
        if content.dtype.name not in ALLOWED:
            raise _not_allowed(name, content.dtype.name)
        if self._floating is not None and content.dtype.kind == "f":
            content = content.astype(self._floating, copy=False)
        return RaggedArray(content, values.offsets) if isinstance(values, RaggedArray) else content


def _narrow(
    function: Any, given: pa.RecordBatch, error: Exception
) -> tuple[pa.RecordBatch, Exception]:
    """The fewest rows on which it still fails, found by halving: costs one more call for each."""
    while given.num_rows > 1:
        half = given.num_rows // 2
        for part in (given.slice(0, half), given.slice(half)):
            try:
                function(part)
            except Exception as found:
                given, error = part, found
                break
        else:
            return given, error  # it fails only on all of them together
    return given, error


def _describe(values: np.ndarray | RaggedArray) -> tuple[str, str]:
    """Type and shape of a row, as a person would read them."""
    if isinstance(values, RaggedArray):
        inner = ", ".join(map(str, values.values.shape[1:])) if len(values.values) else ""
        return values.values.dtype.name, "of any length" + (f", each of [{inner}]" if inner else "")
    return values.dtype.name, f"of shape {list(values.shape[1:])}"


def _other_types(before: Signature, now: Signature, num_rows: int) -> DataError:
    if before.keys() != now.keys():
        return DataError(
            f"preprocess returned the columns {', '.join(now)} for a chunk of {num_rows:,} rows, "
            f"and {', '.join(before)} for those before. It must return the same ones every time"
        )
    name = next(name for name in now if now[name] != before[name])
    return DataError(
        f"preprocess returned rows of {now[name][0]} {now[name][1]} in column {name!r} for a chunk "
        f"of {num_rows:,} rows, and of {before[name][0]} {before[name][1]} for those before. Every "
        "chunk needs the same: resize, pad or cast there"
        + ("" if now[name][0] != before[name][0] else ", or return Arrow lists and set collate=")
    )


def _ragged_without_collate(name: str) -> DataError:
    return DataError(
        f"preprocess returned a Ragged for column {name!r}, and nothing makes a tensor of it: set "
        "collate, for instance collate=dml.pad()"
    )


def _not_allowed(name: str, kind: str) -> DataError:
    return DataError(
        f"preprocess returned {kind} for column {name!r}; it must be one of {', '.join(ALLOWED)}"
    )


def _numpy_type(name: str, kind: pa.DataType) -> str:
    try:
        numpy_name = str(np.dtype(kind.to_pandas_dtype()).name)
    except (NotImplementedError, TypeError):
        raise _not_allowed(name, str(kind)) from None
    if numpy_name not in ALLOWED:
        raise _not_allowed(name, str(kind))
    return numpy_name


def _name(value: Any) -> str:
    return "an empty dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"
