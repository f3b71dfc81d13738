"""Encodes objects as JSON: numbers and text as they are, all else as an object keyed by its kind.

    {"import": path}                          a class or function of a module
    {"partial": {"of", "args", "kwargs"}}     functools.partial over such a one
    {"object": {"class", "args", "state"}}    a strategy or callback, by its constructor's arguments
    {"tuple": [...]}, {"dict": {...}}         values that JSON lacks, or that look like one of these

The author of the JSON chooses what is called with which arguments: `allowed` says what it may name.
An import path is "package.module:Qualified.name", and names the very same object.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import MethodType
from typing import Any

from sparkdml.errors import DataError, SetupError, SparkDMLError
from sparkdml.persistence.allowed import (
    HOW_TO_MARK,
    check_found,
    check_import,
    is_known,
    may_be_built,
    may_be_called,
    may_be_value,
    package_of,
    refuse,
)
from sparkdml.persistence.permission import allow_pickle, is_pickle_allowed
from sparkdml.persistence.secrets import check_named, check_text
from sparkdml.recorded_names import current_module, recorded_module


class NotPlain(Exception):
    """An object can't be saved as data; the message says why. Users never see it as it is."""


class NotMarked(NotPlain):
    """A function that can be imported, but may not be called for a file."""


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
    """Return what `import_path` named, if the file may name it; imports the module."""
    check_import(path, wanted_by)
    module_name, _, name = path.partition(":")
    try:
        value = _descend(importlib.import_module(current_module(module_name, name)), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"{wanted_by} was saved as {path}, which can't be imported here: {error}. Install the "
            f"package of {module_name}, or add its folder to PYTHONPATH, then load again."
        ) from error
    check_found(path, value, wanted_by)
    return value


def find_loaded(path: str) -> Any:
    """Return what `import_path` named, without importing anything."""
    module_name, _, name = path.partition(":")
    try:
        return _descend(sys.modules[module_name], name)
    except (KeyError, AttributeError) as error:
        raise NotPlain(f"it contains {path}, which can't be imported") from error


def _descend(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def encode_reference(value: Any, param: str = "") -> Any:
    """Encode the object as JSON, or raise NotPlain; `param` if it is a Param's own value."""
    if type(value) is str:
        check_text(value)
        return value
    if value is None or type(value) in (bool, int, float):
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
        path = import_path(value)
        if not may_be_value(value, param):
            raise NotMarked(f"{path} is not marked. {HOW_TO_MARK}")
        return {"import": check_nameable(path)}
    return {"object": _encode_object(value)}


def decode_reference(saved: Any, wanted_by: str, param: str = "") -> Any:
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
        found = import_object(content, wanted_by)
        if not may_be_value(found, param) and not is_pickle_allowed():
            raise refuse(wanted_by, content, "a reference to")
        return found
    if kind == "partial":
        return _decode_partial(content, wanted_by)
    if kind == "object":
        return _decode_object(content, wanted_by)
    raise DataError(f"{wanted_by} is saved as an unknown kind of reference: {sorted(saved)}")


def check_nameable(path: str) -> str:
    """Return the path, or raise NotPlain if only `allow_pickle` would let a file name it."""
    if not is_known(path) and package_of(path) is None:
        raise NotPlain(f"{path} is not among torch's own layers, losses, optimizers, schedulers")
    return path


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    for name, item in value.items():
        if not isinstance(name, str):
            raise NotPlain(f"the key {name!r} is not text")
        check_named(name, item)
    return {name: encode_reference(item) for name, item in value.items()}


def _encode_partial(value: functools.partial[Any]) -> dict[str, Any]:
    path = import_path(value.func)
    if not may_be_called(value.func):
        raise NotMarked(f"{path} has arguments bound to it and is not marked. {HOW_TO_MARK}")
    return {
        "of": check_nameable(path),
        "args": [encode_reference(item) for item in value.args],
        "kwargs": _encode_dict(value.keywords),
    }


def _decode_partial(saved: dict[str, Any], wanted_by: str) -> Any:
    function = import_object(saved["of"], wanted_by)
    if not may_be_called(function) and not is_pickle_allowed():
        raise refuse(wanted_by, saved["of"], "a partial over")
    arguments = [decode_reference(item, wanted_by) for item in saved["args"]]
    keywords = {name: decode_reference(item, wanted_by) for name, item in saved["kwargs"].items()}
    return functools.partial(function, *arguments, **keywords)


def _encode_object(value: Any) -> dict[str, Any]:
    kind = type(value)
    if not may_be_built(kind):
        raise NotPlain(f"{kind.__qualname__} is no strategy and no callback, and not marked")
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
    with allow_pickle():  # all of it is in this process already
        rebuilt = _decode_object({**saved, "state": {n: state[n] for n in arguments}}, path)
    _check_same(rebuilt, saved)
    return saved


def _check_same(rebuilt: Any, saved: dict[str, Any]) -> None:
    for name in saved["args"]:
        if encode_reference(vars(rebuilt).get(name)) != saved["state"][name]:
            raise NotPlain(f"the constructor changes its argument {name!r}")


def _decode_object(saved: dict[str, Any], wanted_by: str) -> Any:
    kind = import_object(saved["class"], wanted_by)
    if not may_be_built(kind) and not is_pickle_allowed():
        raise refuse(wanted_by, saved["class"], "an object of")
    if any(name.startswith("_") for name in saved["state"]):
        raise DataError(f"{wanted_by} is saved with private attributes, which no save writes")
    state = {name: decode_reference(item, wanted_by) for name, item in saved["state"].items()}
    try:
        built = kind(**{name: state[name] for name in saved["args"]})
    except SparkDMLError:
        raise
    except Exception as error:  # of the class's own code
        raise DataError(f"{wanted_by} can't be made by {saved['class']}: {error}") from error
    vars(built).update(state)  # what the constructor does not take, in frozen dataclasses too
    return built
