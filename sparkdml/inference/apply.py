"""Adds predictions to a DataFrame as columns. Driver only.

An Arrow function sends only the columns that the model reads to Python, and returns only those that
it computes; all others stay in the JVM. `mapInArrow` would send every column to Python and back: it
is used only where Arrow functions aren't available.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StructField,
    StructType,
    UserDefinedType,
)

from sparkdml.errors import DataError, SetupError
from sparkdml.inference.predictor import PredictionPlan, Predictor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_HAS_ARROW_UDF = hasattr(functions, "arrow_udf")  # Spark 4.1 and later
_COLUMNAR_INPUT = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"


def add_predictions(dataset: DataFrame, plans: Sequence[PredictionPlan]) -> DataFrame:
    """Add the columns of all plans to the DataFrame, in one pass through Python."""
    added = [name for plan in plans for name, _ in plan.columns]
    for name in added:
        if name in dataset.columns:
            raise DataError(
                f"the DataFrame already has a column {name!r}: drop it, or set another name "
                "(predictionCol, outputCols, …)"
            )
        if added.count(name) > 1:
            raise DataError(f"two outputs would be named {name!r}: set different names")
    if not _HAS_ARROW_UDF or _would_break_on_vectors(dataset):
        return _map_in_arrow(dataset, plans)
    called, fields = [], []
    for index, plan in enumerate(plans):
        # Spark may evaluate a deterministic function twice for each row, as when a filter uses the
        # prediction. This one is evaluated once, or not at all if it is not used.
        call = make_udf(plan).asNondeterministic()(*map(quote, plan.inputs))
        names = [name for name, _ in plan.columns]
        holder = names[0] if len(names) == 1 else f"__sparkdml_outputs_{index}"
        called.append(call.alias(holder))
        holding = functions.col(quote(holder))
        fields += [holding] if len(names) == 1 else [holding[name].alias(name) for name in names]
    predicted = dataset.select("*", *called)
    if len(fields) == len(called):
        return predicted  # a second projection would copy every row once more
    own = [functions.col(quote(name)) for name in dataset.columns]
    return predicted.select(*own, *fields)


def make_udf(plan: PredictionPlan) -> Any:
    """Return a function of the columns `plan.inputs`, in their order."""
    if not _HAS_ARROW_UDF:
        raise SetupError(
            "udf() needs the Arrow functions of Spark 4.1 or later. Use transform(), or upgrade "
            "pyspark"
        )
    predictor = Predictor(plan)

    def predict(*columns):  # type: ignore[no-untyped-def] # Spark reads type hints as options
        return predictor(*columns)

    make: Any = functions.arrow_udf  # type: ignore[attr-defined] # its stub forgets it
    return make(predict, returnType=result_type(plan))


def result_type(plan: PredictionPlan) -> DataType:
    fields = [StructField(name, encoder.spark_type()) for name, encoder in plan.columns]
    return fields[0].dataType if len(fields) == 1 else StructType(fields)


def quote(name: str) -> str:
    """Quote a column's name for SQL: dots and spaces are part of it."""
    return "`" + name.replace("`", "``") + "`"


def _would_break_on_vectors(dataset: DataFrame) -> bool:
    """Work around Spark 4.3, which passes columnar batches to Arrow functions.

    It fails if one of the columns is a stored vector, or of another user-defined type.
    """
    if not any(map(_has_udt, (field.dataType for field in dataset.schema.fields))):
        return False
    try:
        return dataset.sparkSession.conf.get(_COLUMNAR_INPUT) == "true"
    except Exception:  # other versions of Spark have no such setting, and raise different errors
        return False


def _has_udt(kind: DataType) -> bool:
    if isinstance(kind, UserDefinedType):
        return True
    if isinstance(kind, ArrayType):
        return _has_udt(kind.elementType)
    if isinstance(kind, MapType):
        return _has_udt(kind.keyType) or _has_udt(kind.valueType)
    return isinstance(kind, StructType) and any(_has_udt(field.dataType) for field in kind.fields)


def _map_in_arrow(dataset: DataFrame, plans: Sequence[PredictionPlan]) -> DataFrame:
    fields = [
        StructField(name, encoder.spark_type()) for plan in plans for name, encoder in plan.columns
    ]
    schema = StructType([*dataset.schema.fields, *fields])
    return dataset.mapInArrow(partial(_predict_batches, tuple(plans)), schema)


def _predict_batches(
    plans: tuple[PredictionPlan, ...], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    predictors = [Predictor(plan) for plan in plans]
    for batch in batches:
        if batch.num_rows:
            arrays, names = list(batch.columns), list(batch.schema.names)
            for predictor in predictors:
                inputs = batch.select(list(predictor.plan.inputs))
                arrays += predictor.columns(inputs)
                names += [name for name, _ in predictor.plan.columns]
            yield pa.RecordBatch.from_arrays(arrays, names=names)
