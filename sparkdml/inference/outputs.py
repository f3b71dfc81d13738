"""How the outputs of a module become columns: their Spark types at the driver, Arrow in the worker.

The driver decides which columns `transform` adds, from the module's outputs and the user's Params;
the worker fills them. One number per row becomes a double, as in Spark's own predictions; several
become an array of the tensor's type; several tensors become columns of their own, or one struct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sparkdml.errors import DataError, ParameterError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


SINGLE = ""  # the name of the output of a module that returns one tensor

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Output:
    """One of the tensors that a module returns: its shape and type for one row."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"  # torch's name

    @property
    def is_number(self) -> bool:
        return self.shape in ((), (1,))


class Encoder(Protocol):
    """Makes one column from a batch's outputs. Frozen, since it is shipped."""

    def spark_type(self) -> DataType: ...

    def encode(self, outputs: Outputs) -> pa.Array: ...


@dataclass(frozen=True)
class Raw:
    """The tensor as it is."""

    output: Output
    is_prediction: bool = False  # whole numbers become doubles too: Spark's evaluators want them

    def spark_type(self) -> DataType:
        from pyspark.sql.types import ArrayType, DoubleType

        if self.output.is_number:
            return DoubleType() if self._is_double else _element_type(self.output.dtype)
        kind = _element_type(self.output.dtype)
        for _ in self.output.shape:
            kind = ArrayType(kind, containsNull=False)
        return kind

    def encode(self, outputs: Outputs) -> pa.Array:
        array = _to_numpy(outputs[self.output.name], self.output.dtype)
        if array.ndim - 1 != len(self.output.shape):
            raise DataError(
                f"the model returned rows of shape {list(array.shape[1:])}"
                f"{_in_output(self.output)}, but {list(self.output.shape)} in training"
            )
        if not self.output.is_number:
            return to_lists(array)
        flat = array.reshape(len(array))
        return pa.array(flat.astype(np.float64) if self._is_double else flat)

    @property
    def _is_double(self) -> bool:
        return self.is_prediction or "float" in self.output.dtype


@dataclass(frozen=True)
class ClassIndex:
    """The index of the largest output, as a double; of several along the last dimension, arrays."""

    output: Output

    def spark_type(self) -> DataType:
        from pyspark.sql.types import ArrayType, DoubleType

        kind: DataType = DoubleType()
        for _ in self.output.shape[:-1]:
            kind = ArrayType(kind, containsNull=False)
        return kind

    def encode(self, outputs: Outputs) -> pa.Array:
        found = outputs[self.output.name].argmax(dim=-1).numpy().astype(np.float64)
        return pa.array(found) if found.ndim == 1 else to_lists(found)


@dataclass(frozen=True)
class Struct:
    """Several outputs in one column, a field for each."""

    fields: tuple[tuple[str, Encoder], ...]

    def spark_type(self) -> DataType:
        from pyspark.sql.types import StructField, StructType

        return StructType([StructField(name, field.spark_type()) for name, field in self.fields])

    def encode(self, outputs: Outputs) -> pa.Array:
        arrays = [field.encode(outputs) for _, field in self.fields]
        return pa.StructArray.from_arrays(arrays, names=[name for name, _ in self.fields])


def by_name(returned: Any, num_rows: int) -> Outputs:
    """Return the tensors that a module returned by name; those of a tuple by their index."""
    if isinstance(returned, Mapping) and returned:
        found = {str(name): value for name, value in returned.items()}
    elif isinstance(returned, tuple | list) and returned:
        found = {str(index): value for index, value in enumerate(returned)}
    else:
        found = {SINGLE: returned}
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != num_rows:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            where = f" in output {name!r}" if name else ""
            raise DataError(
                f"the model returned {got}{where} for {num_rows:,} rows; each output must be a "
                "tensor whose first dimension is the rows. Set predict=fn(modules, batch) to "
                "choose what is returned"
            )
    return found


def to_lists(array: np.ndarray) -> pa.Array:
    """Convert an array of shape (rows, …) to nested lists."""
    result: Any = pa.array(np.ascontiguousarray(array).reshape(-1))
    for depth in range(array.ndim - 1, 0, -1):
        length, count = array.shape[depth], int(np.prod(array.shape[:depth]))
        offsets = np.arange(count + 1, dtype=np.int64) * length
        if offsets[-1] > np.iinfo(np.int32).max:
            raise DataError(
                f"a batch's output has {offsets[-1]:,} numbers, more than Arrow lists hold: lower "
                "spark.sql.execution.arrow.maxRecordsPerBatch"
            )
        result = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), result)
    return result


def _to_numpy(tensor: Tensor, dtype: str) -> np.ndarray:
    array: np.ndarray = tensor.to(getattr(torch, _kept_as(dtype))).numpy()
    return array


def _kept_as(dtype: str) -> str:
    """Return the Spark type of a tensor's; Spark has no half-precision and no unsigned numbers."""
    return {"float16": "float32", "bfloat16": "float32", "uint8": "int16"}.get(dtype, dtype)


def _element_type(dtype: str) -> DataType:
    from pyspark.sql import types

    kinds = {
        "bool": types.BooleanType(),
        "int8": types.ByteType(),
        "int16": types.ShortType(),
        "int32": types.IntegerType(),
        "int64": types.LongType(),
        "float32": types.FloatType(),
        "float64": types.DoubleType(),
    }
    if _kept_as(dtype) not in kinds:
        raise DataError(
            f"the model's outputs are {dtype}, which no Spark column has: cast them in the module "
            "or in predict="
        )
    return kinds[_kept_as(dtype)]


def _in_output(output: Output) -> str:
    return f" in output {output.name!r}" if output.name else ""


Columns = tuple[tuple[str, Encoder], ...]


def choose_columns(
    outputs: tuple[Output, ...],
    prediction: str,
    names: Sequence[str] | None,
    wanted: str,
    classifies: bool,
) -> Columns:
    """Return the columns that `transform` adds.

    `wanted` is the Param `output`; `classifies` says whether the loss takes class numbers.
    """
    if names is not None:
        return _by_output(outputs, names)
    if len(outputs) > 1:
        if wanted == "class":
            raise ParameterError(
                "output", wanted, f"'auto' or 'raw' for a model with {len(outputs)} outputs"
            )
        return ((prediction, Struct(tuple((_field(o), Raw(o)) for o in outputs))),)
    output = outputs[0]
    if wanted == "class" and not output.shape:
        raise DataError("output='class' needs a model with one output for each class")
    is_class = wanted == "class" or (
        wanted == "auto" and classifies and len(output.shape) == 1 and not output.is_number
    )
    encoder: Encoder = ClassIndex(output) if is_class else Raw(output, is_prediction=True)
    return ((prediction, encoder),)


def _by_output(outputs: tuple[Output, ...], names: Sequence[str]) -> Columns:
    """Return one for each output: by name if the model's dict has these names, else in order."""
    by_name = {output.name: output for output in outputs}
    if len(names) != len(outputs):
        returned = ", ".join(by_name) if len(outputs) > 1 else "one tensor"
        raise ParameterError(
            "outputCols",
            list(names),
            f"{len(outputs)} names, one for each output of the model ({returned})",
        )
    ordered = [by_name[n] for n in names] if set(names) == set(by_name) else list(outputs)
    return tuple((name, Raw(output)) for name, output in zip(names, ordered, strict=True))


def _field(output: Output) -> str:
    """Return a struct field's name; those of a tuple are named `_1`, `_2`, … as in Spark."""
    return f"_{int(output.name) + 1}" if output.name.isdigit() else output.name
