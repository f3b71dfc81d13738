"""A fitted model in Spark's Python worker, on its main thread: Arrow columns in, Arrow columns out.

The driver only builds and pickles the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
from pyspark.sql.pandas.types import to_arrow_type
from torch import Tensor, nn

from sparkdml.feed.arrow import read_columns
from sparkdml.feed.batch import Batch
from sparkdml.feed.collate import Collator
from sparkdml.feed.plan import FeedPlan
from sparkdml.feed.preprocess import Preprocessor
from sparkdml.inference.outputs import Encoder, Outputs, by_name
from sparkdml.inference.weights import ShippedModel, load_module

# Small rows go through the model in larger pieces than batchSize.
LIGHT_ROWS, LIGHT_BYTES = 1024, 1 << 20


@dataclass(frozen=True)
class PredictionPlan:
    """Everything that a worker needs, as it is shipped."""

    model: ShippedModel
    inputs: tuple[str, ...]  # the DataFrame's columns, in the order in which they arrive
    feed: FeedPlan
    features: tuple[str, ...]
    predict: Callable[[Any, Batch], Any] | str | None
    batch_size: int
    columns: tuple[tuple[str, Encoder], ...]


class Predictor:
    """One plan in one process."""

    def __init__(self, plan: PredictionPlan) -> None:
        self.plan = plan

    @classmethod
    def of_module(cls, plan: PredictionPlan, module: nn.Module) -> Predictor:
        """Build a predictor for a module that is already in this process."""
        predictor = cls(plan)
        predictor.__dict__["module"] = module
        return predictor

    def __getstate__(self) -> dict[str, Any]:
        return {"plan": self.plan}  # never the module that a worker has loaded

    def __call__(self, *arrays: pa.Array) -> pa.Array:
        """Return the one column, or a struct of all of them."""
        columns = self.columns(pa.RecordBatch.from_arrays(list(arrays), names=self.plan.inputs))
        if len(columns) == 1:
            return columns[0]
        names = [name for name, _ in self.plan.columns]
        return pa.StructArray.from_arrays(columns, names=names)

    def columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        if not batch.num_rows:  # modules need not handle empty batches
            kinds = [to_arrow_type(encoder.spark_type()) for _, encoder in self.plan.columns]
            return [pa.array([], type=kind) for kind in kinds]
        pieces = list(self.outputs(batch))
        if len({tuple(value.shape[1:] for value in piece.values()) for piece in pieces}) == 1:
            pieces = [{name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}]
        return [
            pa.concat_arrays([encoder.encode(piece) for piece in pieces])
            for _, encoder in self.plan.columns
        ]

    def outputs(self, batch: pa.RecordBatch) -> Iterator[Outputs]:
        """Yield the outputs piece by piece, on the CPU."""
        with torch.inference_mode():
            for piece in self.batches(batch):
                found = by_name(self._run(piece), piece.num_rows)
                yield {name: value.cpu() for name, value in found.items()}

    def batches(self, batch: pa.RecordBatch) -> Iterator[Batch]:
        """Yield the model's inputs. Rows are cut before collate, so each piece has its padding."""
        if self.plan.feed.collate is None:
            whole = self._prepare(batch)
            yield from whole.split(self._rows_at_once(whole))
            return
        for start in range(0, batch.num_rows, self.plan.batch_size):
            yield self._prepare(batch.slice(start, self.plan.batch_size))

    def _run(self, batch: Batch) -> Any:
        placed = Batch({name: self._place(batch[name]) for name in batch}, batch.num_rows)
        predict = self.plan.predict
        if callable(predict):
            return predict(self.module, placed)
        module: Any = self.module if predict is None else getattr(self.module, predict)
        return module(*(placed[name] for name in self.plan.features))

    def _place(self, tensor: Tensor) -> Tensor:
        """Move inputs to the device; floating-point columns get the module's own type."""
        if tensor.is_floating_point():
            return tensor.to(self._device, self._dtype)
        return tensor.to(self._device)

    def _rows_at_once(self, batch: Batch) -> int:
        bytes_per_row = sum(batch[name].nbytes for name in batch) // max(1, batch.num_rows)
        light = min(LIGHT_ROWS, LIGHT_BYTES // max(1, bytes_per_row))
        return max(self.plan.batch_size, light)

    def _prepare(self, batch: pa.RecordBatch) -> Batch:
        return self._collator(read_columns(self.plan.feed, batch, self._preprocessor))

    @cached_property
    def module(self) -> nn.Module:
        if self._device.type == "cpu":
            torch.set_num_threads(1)  # Spark runs as many tasks as there are cores
        return load_module(self.plan.model, self._device)

    @cached_property
    def _device(self) -> torch.device:
        return task_device()

    @cached_property
    def _dtype(self) -> torch.dtype:
        kinds = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(kinds, torch.float32)

    @cached_property
    def _preprocessor(self) -> Preprocessor | None:
        return None if self.plan.feed.preprocess is None else Preprocessor(self.plan.feed)

    @cached_property
    def _collator(self) -> Collator:
        return Collator(self.plan.feed, self.plan.feed.required)


def task_device() -> torch.device:
    """Return the GPU that Spark assigned to this task, or the CPU."""
    from pyspark import TaskContext

    from sparkdml.runtime.worker.main import choose_device

    task = TaskContext.get()
    resources = {} if task is None else task.resources()
    return torch.device(choose_device(0, resources, torch.cuda.is_available))
