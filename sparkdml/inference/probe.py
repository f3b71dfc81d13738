"""What a model returns for a row, found out by running it: where training could not tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.inference.apply import quote
from sparkdml.inference.outputs import Output
from sparkdml.inference.predictor import PredictionPlan, Predictor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWS = 2  # one would let a module squeeze the rows away unseen


def find_outputs(dataset: DataFrame, plan: PredictionPlan) -> tuple[Output, ...]:
    """The names, shapes and types of the outputs, from a small job over the first rows."""
    if dataset.isStreaming:
        raise DataError(
            "what predict= returns is found out from some rows, which a stream doesn't have yet: "
            "call transform once on a DataFrame of the same columns before"
        )
    rows = dataset.select(*map(quote, plan.inputs)).limit(_ROWS).coalesce(1)
    found = rows.mapInArrow(
        partial(describe_outputs, replace(plan, columns=())),
        "name string, shape array<int>, dtype string",
    ).collect()
    if not found:
        raise DataError(
            "the DataFrame has no rows, so what predict= returns can't be found out: call "
            "transform on one that has some"
        )
    return tuple(Output(row.name, tuple(row.shape), row.dtype) for row in found)


def describe_outputs(
    plan: PredictionPlan, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    rows = [batch for batch in batches if batch.num_rows]
    if not rows:
        return
    outputs = next(Predictor(plan).outputs(rows[0]))
    yield pa.RecordBatch.from_arrays(
        [
            pa.array(list(outputs)),
            pa.array(
                [list(value.shape[1:]) for value in outputs.values()], type=pa.list_(pa.int32())
            ),
            pa.array([str(value.dtype).removeprefix("torch.") for value in outputs.values()]),
        ],
        names=["name", "shape", "dtype"],
    )
