"""Finds out what a model returns for a row by running it, if training didn't record it.

Also checks the labels of a classifier before its workers start. Called at the driver; some of it
runs as a small Spark job.
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


_ROWS = 2  # with one row, a module's squeeze() could remove the dimension of the rows unnoticed


def find_outputs(dataset: DataFrame, plan: PredictionPlan) -> tuple[Output, ...]:
    """Return the names, shapes and types of the outputs, from a small job over the first rows."""
    if dataset.isStreaming:
        raise DataError(
            "the outputs of predict= are unknown until it has run on some rows, and a stream has "
            "none yet: call transform once on a DataFrame with the same columns first"
        )
    rows = dataset.select(*map(quote, plan.inputs)).limit(_ROWS).coalesce(1)
    found = rows.mapInArrow(
        partial(describe_outputs, replace(plan, columns=())),
        "name string, shape array<int>, dtype string",
    ).collect()
    if not found:
        raise DataError(
            "the outputs of predict= are unknown until it has run on some rows, and the DataFrame "
            "has none: call transform on one that has rows"
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
    """Return the largest class, or None if there are no rows.

    Raises a DataError unless all labels are whole numbers from 0 on. A column of StringIndexer's
    has the answer in its metadata; any other costs one pass over it.
    """
    field = next(field for field in dataset.schema.fields if field.name == name)
    kind = field.dataType.simpleString()
    if kind not in _NUMBERS:
        raise DataError(
            f"the label column {name!r} is {kind}, but classes are whole numbers from 0 on: use "
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
            f"the label column {name!r} has {found['count']:,} values that are not classes, for "
            f"instance {shown}: classes are whole numbers from 0 on. Use StringIndexer, or "
            "TorchRegressor for numbers"
        )
    return None if found["largest"] is None else int(found["largest"])


def try_one_row(
    module: nn.Module, feed: FeedPlan, features: list[str], dataset: DataFrame
) -> int | None:
    """Return the module's number of classes, from its outputs for one row; None if it fails.

    A worker will fail for the same reason, with its rank and a traceback.
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
