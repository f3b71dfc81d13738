"""Loss and metrics of a fitted model over the rows of a DataFrame.

Python workers compute sums for each partition; the driver adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from sparkdml.errors import DataError
from sparkdml.inference.apply import quote
from sparkdml.inference.predictor import PredictionPlan, Predictor, task_device
from sparkdml.training.forward import Forward
from sparkdml.training.metric_objects import MetricObjects
from sparkdml.training.plan import TaskPlan
from sparkdml.training.totals import Totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def evaluate(dataset: DataFrame, plan: PredictionPlan, task: TaskPlan) -> dict[str, float]:
    """Return the means over all rows, however they are partitioned."""
    rows = dataset.select(*map(quote, plan.inputs)).mapInArrow(
        partial(evaluate_batches, plan, task), "stats array<double>, states binary"
    )
    totals, states = Totals(), []
    for row in rows.collect():
        found = Totals.of(row.stats, len(task.loss_names))
        if found.rows:
            totals += found
            states.append(bytes(row.states))
    if not totals.rows:
        raise DataError("the data has no rows, so there is nothing to evaluate")
    means = totals.means(task.metric_names, task.loss_names)
    if task.metric_objects:
        objects = MetricObjects(task.metric_objects, torch.device("cpu"))
        means.update(objects.compute(states))
    return means


def evaluate_batches(
    plan: PredictionPlan, task: TaskPlan, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield one row of sums for each partition."""
    predictor, device = Predictor(plan), task_device()
    forward = Forward(predictor.module, task, device)
    stats = forward.evaluate(
        piece.to(device) if device.type == "cuda" else piece
        for batch in batches
        if batch.num_rows
        for piece in predictor.batches(batch)
    )
    yield pa.RecordBatch.from_arrays(
        [
            pa.array([stats.cpu().tolist()]),
            pa.array([forward.metric_objects.encode()], type=pa.binary()),
        ],
        names=["stats", "states"],
    )
