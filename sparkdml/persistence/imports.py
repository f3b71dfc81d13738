"""Objects by import path: "package.module:Qualified.name", and back to the very same object."""

from __future__ import annotations

import importlib
import sys
from types import MethodType
from typing import Any

from sparkdml.errors import SetupError


class NotPlain(Exception):
    """An object can't be saved as data; says why, and is never seen by a user as it is."""


def import_path(value: Any) -> str:
    """Where a class or function can be imported from, or NotPlain."""
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
    # A class method is bound anew each time it is fetched: equal, never identical.
    if found is not value and not (isinstance(value, MethodType) and found == value):
        raise NotPlain(f"{module_name}.{name} is another object")
    return f"{module_name}:{name}"


def import_object(path: str, wanted_by: str) -> Any:
    """What `import_path` named; imports the module, which is the only code that runs."""
    module_name, _, name = path.partition(":")
    try:
        return _descend(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"{wanted_by} was saved as {path}, which can't be imported here: {error}. Install the "
            f"package of {module_name}, or add its folder to PYTHONPATH, then load again."
        ) from error


def _descend(owner: Any, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner
