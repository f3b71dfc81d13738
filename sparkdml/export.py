"""Exports a fitted module to ONNX or torch.export (.pt2), for use without Spark and sparkdml.

The driver reads the exported file back and runs it on the example and on another number of rows.
If its outputs differ from the module's, the file is removed and an ExportError is raised.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparkdml.errors import ExportError, ParameterError, SetupError
from sparkdml.feed.arrow import prepare
from sparkdml.feed.batch import Batch
from sparkdml.inference.apply import quote
from sparkdml.inference.outputs import by_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.feed.plan import FeedPlan

_EXAMPLE_ROWS = 3


@dataclass(frozen=True)
class ModelToExport:
    """What a fitted model brings to its export."""

    module: nn.Module
    predict: Callable[..., Any] | str | None
    feature_columns: Sequence[str]
    prediction_column: str
    plan_reading: Callable[[DataFrame], FeedPlan]


class Exported(nn.Module):
    """The function that `transform` computes: a module, or the user's `predict`."""

    def __init__(self, model: ModelToExport) -> None:
        super().__init__()
        self.modules_, self.predict = model.module, model.predict
        self.names = model.feature_columns

    def forward(self, *features: Tensor) -> Any:
        if self.predict is None:
            return self.modules_(*features)
        if isinstance(self.predict, str):
            return getattr(self.modules_, self.predict)(*features)
        batch = Batch(dict(zip(self.names, features, strict=True)), features[0].shape[0])
        return self.predict(self.modules_, batch)


def save_onnx(
    model: ModelToExport,
    path: str | os.PathLike[str],
    example: DataFrame | Tensor | Sequence[Tensor],
    tolerance: float = 1e-4,
    **options: Any,
) -> None:
    """Write the module as ONNX, with named inputs and outputs and a dynamic number of rows.

    Args:
        example: some rows: a DataFrame with the model's columns, or a tensor for each of them.
        tolerance: the largest absolute and relative difference between the outputs of onnxruntime
            and of the module.
        options: further arguments of `torch.onnx.export`, such as `opset_version`.
    """
    try:
        import onnxruntime  # type: ignore[import-untyped]
        import onnxscript  # noqa: F401 # torch's exporter is written in it
    except ImportError as error:
        raise SetupError(
            f"save_onnx needs {error.name}: pip install onnx onnxscript onnxruntime"
        ) from error
    target = Path(path)
    module, inputs = Exported(model).eval(), read_example(model, example)
    outputs = by_name(run(module, inputs), len(inputs[0]))
    names = [name or model.prediction_column for name in outputs]
    with _written(target, "ONNX"), _quiet():
        torch.onnx.export(
            module,
            inputs,
            target,
            dynamo=True,
            input_names=[_identifier(name) for name in module.names],
            output_names=[_identifier(name) for name in names],
            dynamic_shapes={"features": _any_rows(inputs)},
            verbose=False,
            **options,
        )
        session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
        taken = [entry.name for entry in session.get_inputs()]

        def run_onnx(*tensors: Tensor) -> list[Tensor]:
            # ONNX drops inputs that the model ignores.
            given = dict(zip(map(_identifier, module.names), tensors, strict=True))
            found = session.run(None, {name: given[name].numpy() for name in taken})
            return [torch.from_numpy(array) for array in found]

        compare(module, run_onnx, inputs=inputs, tolerance=tolerance, target=target)


def save_exported(
    model: ModelToExport,
    path: str | os.PathLike[str],
    example: DataFrame | Tensor | Sequence[Tensor],
    tolerance: float = 1e-5,
) -> None:
    """Write the module with torch.export (.pt2), with a dynamic number of rows.

    `torch.export.load(path).module()` is a function of the feature columns' tensors.
    """
    target = Path(path)
    module, inputs = Exported(model).eval(), read_example(model, example)
    with _written(target, "torch.export"), _quiet():
        program = torch.export.export(
            module, inputs, dynamic_shapes={"features": _any_rows(inputs)}, strict=False
        )
        torch.export.save(program, target)
        compare(
            module,
            torch.export.load(target).module(),
            inputs=inputs,
            tolerance=tolerance,
            target=target,
        )


def read_example(
    model: ModelToExport, example: DataFrame | Tensor | Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return a tensor for each feature column, of at least two rows: one is taken for constant."""
    names = model.feature_columns
    if isinstance(example, Tensor):
        found: tuple[Tensor, ...] = (example,)
    elif isinstance(example, Sequence):
        found = tuple(example)
    else:
        feed = model.plan_reading(example)
        wanted = dict.fromkeys(column.name for column in (*feed.inputs, *feed.columns))
        table = example.select(*map(quote, wanted)).limit(_EXAMPLE_ROWS).toArrow()
        if not table.num_rows:
            raise ParameterError("example", "an empty one", "a DataFrame with rows")
        batch = prepare(feed, table.combine_chunks().to_batches()[0])
        found = tuple(batch[name] for name in names)
    if len(found) != len(names) or not all(isinstance(value, Tensor) for value in found):
        raise ParameterError(
            "example",
            f"{len(found)} values",
            f"a DataFrame, or a tensor for each of {', '.join(names)}",
        )
    if len({len(value) for value in found}) != 1 or not len(found[0]):
        raise ParameterError(
            "example",
            [list(value.shape) for value in found],
            "tensors with the same number of rows in their first dimension, at least 1",
        )
    kind = next((p.dtype for p in model.module.parameters()), torch.float32)
    typed = (value.to(kind) if value.is_floating_point() else value for value in found)
    return tuple(torch.cat([v, v]) if len(v) == 1 else v.clone() for v in typed)


def run(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    with torch.no_grad():
        return module(*inputs)


def compare(
    module: nn.Module,
    written: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    tolerance: float,
    target: Path,
) -> None:
    """Raise an ExportError unless both compute the same, on the example and on more rows."""
    for repeats in (1, 3):
        rows = tuple(torch.cat([value] * repeats) for value in inputs)
        wanted = list(by_name(run(module, rows), len(rows[0])).values())
        with torch.no_grad():
            found = _flat(written(*rows))
        for index, (mine, theirs) in enumerate(zip(wanted, found, strict=True)):
            same = mine.shape == theirs.shape and torch.allclose(
                mine.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
            if not same:
                raise ExportError(
                    _difference(
                        mine,
                        theirs,
                        index=index,
                        rows=len(rows[0]),
                        tolerance=tolerance,
                        target=target,
                    )
                )


def _difference(
    mine: Tensor, theirs: Tensor, index: int, rows: int, tolerance: float, target: Path
) -> str:
    if mine.shape != theirs.shape:
        how = f"has the shape {list(theirs.shape)} instead of {list(mine.shape)}"
    else:
        far = (mine.double() - theirs.double()).abs().max().item()
        how = f"differs from the module's by up to {far:.3g}, more than tolerance={tolerance:g}"
    return (
        f"the exported model computes different outputs: for {rows} rows, output {index} {how}. "
        f"{target} was removed. If the difference is acceptable, raise tolerance="
    )


def _flat(returned: Any) -> list[Tensor]:
    if isinstance(returned, Tensor):
        return [returned]
    return list(returned.values()) if isinstance(returned, Mapping) else list(returned)


def _any_rows(inputs: tuple[Tensor, ...]) -> tuple[dict[int, Any], ...]:
    rows = torch.export.Dim("rows", min=1)
    return tuple({0: rows} for _ in inputs)


def _identifier(name: str) -> str:
    plain = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return plain if plain[:1].isalpha() else f"_{plain}"


@contextlib.contextmanager
def _written(target: Path, how: str) -> Iterator[None]:
    """Remove the file if the export fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except Exception as error:
        for file in (target, target.with_name(f"{target.name}.data")):
            file.unlink(missing_ok=True)
        if isinstance(error, ExportError):
            raise
        raise ExportError(
            f"the model can't be exported by {how}: {type(error).__name__}: {error}. A common cause"
            " is a forward() that branches on the values of tensors or on their number of rows"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore the exporters' warnings, which concern their internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
