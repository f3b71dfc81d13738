"""The functions and classes that a saved model may have called: those marked by `@dml.factory`.

A marked object is in this process's table; it has no attribute that says so, and a wrapper or a
copy of it is not marked. The driver reads the table while it loads a model; workers, which import
the same modules, only fill it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar

from sparkdml.errors import ParameterError

Marked = TypeVar("Marked")

_MARKED: dict[int, Any] = {}  # by id; each stays in the table, so that no id is used again


def factory(function: Marked) -> Marked:
    """Mark a function or class as one that a loaded model may call, with arguments from its file.

    Classes of modules, optimizers and schedulers need no mark. Mark only what is harmless with any
    arguments: the author of a model's file chooses them.

    >>> @sparkdml.factory
    ... def make_net(hidden=64):
    ...     return nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    A function of another package is marked by a call, before the model is loaded:
    `sparkdml.factory(torchvision.models.resnet18)`.
    """
    inner = _inner(function)
    if not callable(inner):
        raise ParameterError("function", function, "a function or a class, as a decorator has it")
    _MARKED[id(inner)] = inner
    return function


def is_factory(value: Any) -> bool:
    inner = _inner(value)
    return inner is not None and _MARKED.get(id(inner)) is inner


def _inner(value: Any) -> Any:
    """The function of a method: a bound method is another object each time it is fetched."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        return value.__func__
    return value
