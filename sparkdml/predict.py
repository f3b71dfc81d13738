"""Inference inside Spark tasks: module-level functions over Arrow batches, a module per process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from sparkdml.feed.batch import Batch
from sparkdml.feed.columns import Column, to_numpy
from sparkdml.training.job import load_weights
from sparkdml.training.objective import LossFunction
from sparkdml.training.task import Forward, Metric, ModelSource, TaskPlan, build_module


@dataclass(frozen=True)
class ModelSpec:
    """A fitted model as it is shipped: what makes the module, and its weights."""

    key: str  # the same for the same weights; processes keep the module under it
    model: ModelSource
    weights: bytes
    features: tuple[Column, ...]
    batch_size: int


_LOADED: OrderedDict[str, nn.Module] = OrderedDict()
_MAX_LOADED = 2


def load_module(spec: ModelSpec) -> nn.Module:
    """The module, built once a process and kept for the next batch, partition and query."""
    if spec.key not in _LOADED:
        _LOADED[spec.key] = load_weights(build_module(spec.model), spec.weights).eval()
        while len(_LOADED) > _MAX_LOADED:
            _LOADED.popitem(last=False)
    _LOADED.move_to_end(spec.key)
    return _LOADED[spec.key]


def predict_batches(
    spec: ModelSpec,
    prediction_col: str,
    kind: Literal["raw", "class"],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Every column passed through, and the prediction beside them."""
    torch.set_num_threads(1)  # Spark runs as many tasks as there are cores
    module = load_module(spec)
    for batch in batches:
        if batch.num_rows:
            outputs = _outputs(spec, module, batch)
            values = outputs.argmax(dim=-1) if kind == "class" else outputs
            yield _with_column(batch, prediction_col, to_arrow(values))


def evaluate_batches(
    spec: ModelSpec,
    loss: LossFunction,
    metrics: dict[str, Metric],
    label: Column,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """One row of sums for each partition."""
    torch.set_num_threads(1)
    plan = TaskPlan(
        model=spec.model,
        loss=loss,
        optimizer=torch.optim.SGD,
        features=tuple(column.name for column in spec.features),
        label=label.name,
        metrics=metrics,
        batch_size=spec.batch_size,
    )
    forward = Forward(load_module(spec), plan, torch.device("cpu"))
    stats = forward.evaluate(_tensors((*spec.features, label), batch) for batch in batches)
    yield pa.RecordBatch.from_arrays([pa.array([stats.tolist()])], names=["stats"])


def _outputs(spec: ModelSpec, module: nn.Module, batch: pa.RecordBatch) -> Tensor:
    outputs = []
    with torch.inference_mode():
        for piece in _tensors(spec.features, batch).split(spec.batch_size):
            outputs.append(module(*(piece[column.name] for column in spec.features)))
    return torch.cat(outputs)


def _tensors(columns: tuple[Column, ...], batch: pa.RecordBatch) -> Batch:
    arrays = {c.name: torch.from_numpy(to_numpy(c, batch.column(c.name), batch)) for c in columns}
    return Batch(arrays, batch.num_rows)


def to_arrow(values: Tensor) -> pa.Array:
    """Predictions as Spark has them: a double for one number a row, else arrays of floats."""
    array: np.ndarray = values.float().numpy()
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 1:
        return pa.array(array.astype(np.float64))
    result: Any = pa.array(np.ascontiguousarray(array).reshape(-1))
    for length in reversed(array.shape[1:]):
        offsets = np.arange(0, len(result) + 1, length, dtype=np.int32)
        result = pa.ListArray.from_arrays(pa.array(offsets), result)
    return result


def _with_column(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    arrays = [*batch.columns, values]
    return pa.RecordBatch.from_arrays(arrays, names=[*batch.schema.names, name])
