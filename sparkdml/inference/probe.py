"""What a model returns for a row, found out by running it: where training could not tell.

A classifier's labels, looked at before the workers start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import torch
from pyspark.sql import functions
from torch import Tensor, nn

from sparkdml.errors import DataError
from sparkdml.feed.arrow import prepare
from sparkdml.feed.plan import FeedPlan
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


_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "boolean")


def find_largest_label(dataset: DataFrame, name: str) -> int | None:
    """The largest class, or None of no rows; a DataError unless all are whole numbers from 0 on.

    A column of StringIndexer's says it by itself; any other costs one pass over it.
    """
    field = next(field for field in dataset.schema.fields if field.name == name)
    kind = field.dataType.simpleString()
    if kind not in _NUMBERS:
        raise DataError(
            f"the label column {name!r} is {kind}, but classes are numbered from 0 on: use "
            "StringIndexer"
        )
    indexed = field.metadata.get("ml_attr", {}).get("vals")
    if indexed:
        return len(indexed) - 1
    label = functions.col(quote(name)).cast("double")
    odd = (label < 0) | (label != functions.floor(label)) | functions.isnan(label)
    found = dataset.select(
        functions.max(label).alias("largest"),
        functions.max(functions.when(odd, label)).alias("odd"),
        functions.count(functions.when(odd, 1)).alias("count"),
    ).first()
    assert found is not None, "an aggregate has one row"
    if found["count"]:
        value = found["odd"]
        shown = int(value) if math.isfinite(value) and value == int(value) else value
        raise DataError(
            f"the label column {name!r} has {found['count']:,} values that are no class, for "
            f"instance {shown}: classes are whole numbers from 0 on. Use StringIndexer, or "
            "TorchRegressor for numbers"
        )
    return None if found["largest"] is None else int(found["largest"])


def try_one_row(
    module: nn.Module, feed: FeedPlan, features: list[str], dataset: DataFrame
) -> int | None:
    """How many classes the module tells apart, from its outputs for one row; None if it fails.

    Whatever it fails of, a worker will fail of too, and tell with rank and traceback.
    """
    names = list(dict.fromkeys(column.name for column in feed.columns))
    table = dataset.select(*map(quote, names)).limit(1).toArrow()
    if not table.num_rows:
        return None
    was_training = module.training
    try:
        batch = prepare(feed, table.combine_chunks().to_batches()[0])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = module.eval()(*(batch[name] for name in features))
    except Exception:
        return None
    finally:
        module.train(was_training)
    if not isinstance(outputs, Tensor) or outputs.dim() not in (1, 2):
        return None
    return 2 if outputs.dim() == 1 or outputs.shape[1] == 1 else outputs.shape[1]
