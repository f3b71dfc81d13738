"""Which columns `transform` adds, from what the model returns and what the user asked for."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdml.errors import DataError, ParameterError
from sparkdml.inference.outputs import ClassIndex, Encoder, Output, Raw, Struct

Columns = tuple[tuple[str, Encoder], ...]


def choose_columns(
    outputs: tuple[Output, ...],
    prediction: str,
    names: Sequence[str] | None,
    wanted: str,
    classifies: bool,
) -> Columns:
    """`wanted` is the Param `output`, `classifies` whether the loss takes class numbers."""
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
    """One column for each: by name where the model's dict has these names, else in order."""
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
    """Fields of a tuple are named as Spark names those of its own."""
    return f"_{int(output.name) + 1}" if output.name.isdigit() else output.name
