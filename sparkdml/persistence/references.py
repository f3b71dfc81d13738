"""Encodes objects as JSON: numbers and text as they are, all else as an object keyed by its kind.

    {"import": path}                          a class or function of a module
    {"partial": {"of", "args", "kwargs"}}     functools.partial over such a one
    {"object": {"class", "args", "state"}}    a strategy or callback, by its constructor's arguments
    {"tuple": [...]}, {"dict": {...}}         values that JSON lacks, or that look like one of these

The author of the JSON chooses what is called with which arguments. So only callables that make
modules, optimizers, tensors, strategies or callbacks are called with arguments from it. An import
path is "package.module:Qualified.name", and names the very same object.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from types import MethodType
from typing import Any, get_type_hints

import torch
from torch import nn

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.errors import DataError, SetupError
from sparkdml.feed.ragged import pad
from sparkdml.recorded_names import current_module, recorded_module
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback


class NotPlain(Exception):
    """An object can't be saved as data; the message says why. Users never see it as it is."""


def import_path(value: Any) -> str:
    """Return the path that a class or function is imported by, or raise NotPlain."""
    module_name = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str):
        raise NotPlain(f"a {type(value).__name__} can't be imported by name")
    if "<lambda>" in name:
        raise NotPlain("it is a lambda")
    if "<locals>" in name:
        raise NotPlain("it was defined inside a function")
    module = sys.modules.get(module_name)
    if module_name == "__main__" or module is None or getattr(module, "__spec__", None) is None:
        raise NotPlain("it was defined in a notebook or in the script itself")
    try:
        found = _descend(module, name)
    except AttributeError:
        found = None
    # A class method is bound each time it is fetched: equal, never identical.
    if found is not value and not (isinstance(value, MethodType) and found == value):
        raise NotPlain(f"{module_name}.{name} is another object")
    return f"{recorded_module(value)}:{name}"


def import_object(path: str, wanted_by: str) -> Any:
    """Return what `import_path` named. Importing the module is the only code that runs."""
    module_name, _, name = path.partition(":")
    try:
        return _descend(importlib.import_module(current_module(module_name, name)), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"{wanted_by} was saved as {path}, which can't be imported here: {error}. Install the "
            f"package of {module_name}, or add its folder to PYTHONPATH, then load again."
        ) from error


def _descend(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


_CALLED_WITH_ARGUMENTS = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.Tensor,
)


def encode_reference(value: Any) -> Any:
    """Encode the object as JSON, or raise NotPlain with the reason."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_reference(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode_reference(item) for item in value]}
    if type(value) is dict:
        return {"dict": _encode_dict(value)}
    if type(value) is functools.partial:
        return {"partial": _encode_partial(value)}
    if inspect.isclass(value) or inspect.isroutine(value):
        return {"import": import_path(value)}
    return {"object": _encode_object(value)}


def decode_reference(saved: Any, wanted_by: str) -> Any:
    """Decode the object. `wanted_by` names it in errors."""
    if isinstance(saved, list):
        return [decode_reference(item, wanted_by) for item in saved]
    if not isinstance(saved, dict):
        return saved
    kind = next(iter(saved), "") if len(saved) == 1 else ""
    content: Any = saved.get(kind)
    if kind == "tuple":
        return tuple(decode_reference(item, wanted_by) for item in content)
    if kind == "dict":
        return {name: decode_reference(item, wanted_by) for name, item in content.items()}
    if kind == "import":
        return import_object(content, wanted_by)
    if kind == "partial":
        return _decode_partial(content, wanted_by)
    if kind == "object":
        return _decode_object(content, wanted_by)
    raise DataError(f"{wanted_by} is saved as an unknown kind of reference: {sorted(saved)}")


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    for name in value:
        if not isinstance(name, str):
            raise NotPlain(f"the key {name!r} is not text")
    return {name: encode_reference(item) for name, item in value.items()}


def _encode_partial(value: functools.partial[Any]) -> dict[str, Any]:
    _check_may_be_called(value.func)
    return {
        "of": import_path(value.func),
        "args": [encode_reference(item) for item in value.args],
        "kwargs": _encode_dict(value.keywords),
    }


def _decode_partial(saved: dict[str, Any], wanted_by: str) -> Any:
    function = import_object(saved["of"], wanted_by)
    try:
        _check_may_be_called(function)
    except NotPlain as reason:
        raise DataError(f"{wanted_by} is saved as a partial, but {reason}") from None
    arguments = [decode_reference(item, wanted_by) for item in saved["args"]]
    keywords = {name: decode_reference(item, wanted_by) for name, item in saved["kwargs"].items()}
    return functools.partial(function, *arguments, **keywords)


def _check_may_be_called(function: Any) -> None:
    if inspect.isclass(function):
        if issubclass(function, _CALLED_WITH_ARGUMENTS):
            return
    elif getattr(function, "__module__", None) == "torch.nn.functional":
        return
    elif inspect.isroutine(function):
        try:
            made = get_type_hints(function).get("return")
        except Exception:  # a hint may name anything, and evaluating it raise anything
            made = None
        if inspect.isclass(made) and issubclass(made, _CALLED_WITH_ARGUMENTS):
            return
    raise NotPlain(
        f"{getattr(function, '__qualname__', function)} is not marked as making a torch.nn.Module, "
        "a torch.optim.Optimizer or a torch.Tensor: annotate its return type"
    )


def _encode_object(value: Any) -> dict[str, Any]:
    kind = type(value)
    _check_may_be_built(kind)
    path = import_path(kind)
    if not hasattr(value, "__dict__"):
        raise NotPlain(f"{kind.__name__} has __slots__")
    state = _encode_dict({k: v for k, v in vars(value).items() if not k.startswith("_")})
    arguments = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise NotPlain(f"the constructor of {kind.__name__} takes *{name}")
        if name not in state:
            raise NotPlain(
                f"{kind.__name__} does not keep its argument {name!r} as an attribute of that name"
            )
        arguments.append(name)
    saved = {"class": path, "args": arguments, "state": state}
    _check_same(_decode_object({**saved, "state": {n: state[n] for n in arguments}}, path), saved)
    return saved


def _check_same(rebuilt: Any, saved: dict[str, Any]) -> None:
    for name in saved["args"]:
        if encode_reference(vars(rebuilt).get(name)) != saved["state"][name]:
            raise NotPlain(f"the constructor changes its argument {name!r}")


def _decode_object(saved: dict[str, Any], wanted_by: str) -> Any:
    kind = import_object(saved["class"], wanted_by)
    try:
        _check_may_be_built(kind)
    except NotPlain as reason:
        raise DataError(f"{wanted_by} is saved as an object, but {reason}") from None
    state = {name: decode_reference(item, wanted_by) for name, item in saved["state"].items()}
    built = kind(**{name: state[name] for name in saved["args"]})
    vars(built).update(state)  # what the constructor does not take, in frozen dataclasses too
    return built


def _check_may_be_built(kind: Any) -> None:
    if inspect.isclass(kind):
        if issubclass(kind, Strategy | Callback | Checkpoints | pad):
            return
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("sparkdml."):
            return
    raise NotPlain(
        f"{getattr(kind, '__qualname__', kind)} is not an nn.Module, a strategy or a callback"
    )
