"""Saves the structure of a module as a file, with its weights in a safetensors file beside it.

torch's weights-only unpickler reads the skeleton, and may build only the module classes that are
named beside the file. It may call them with arguments from the file, so they must be classes that
`allowed` lets a reference name, too. Driver only.
"""

from __future__ import annotations

import io
import threading
from typing import Any

import safetensors.torch
import torch
from torch import nn

from sparkdml.errors import DataError, SetupError
from sparkdml.inference.structure import Inseparable, allocate, make_skeleton
from sparkdml.persistence.allowed import is_functional, is_module_class
from sparkdml.persistence.permission import is_pickle_allowed
from sparkdml.persistence.references import (
    NotPlain,
    check_nameable,
    find_loaded,
    import_object,
    import_path,
)

# torch keeps one list of allowed classes for the whole process.
_SAFE_GLOBALS = threading.Lock()


def plain_skeleton(module: nn.Module) -> nn.Module:
    """Return the module without the content of its state, or raise NotPlain with the reason."""
    try:
        return make_skeleton(module)
    except Inseparable as reason:
        raise NotPlain(str(reason)) from reason


def put_together(skeleton: nn.Module, weights: bytes | None, file: str) -> nn.Module:
    """Return a module like the saved one; without weights, its state is uninitialized."""
    module = allocate(skeleton)
    if weights is not None:
        try:
            module.load_state_dict(safetensors.torch.load(weights))
        except (safetensors.SafetensorError, RuntimeError) as error:
            raise DataError(f"{file} does not hold the weights of its module: {error}") from error
    return module


def encode_skeleton(skeleton: nn.Module) -> tuple[bytes, list[str]]:
    """Return the skeleton as bytes, and the import paths of the classes that it may build."""
    buffer = io.BytesIO()
    try:
        torch.save(skeleton, buffer)
    except Exception as error:  # hooks, handles and attributes of any kind
        raise NotPlain(f"torch.save fails: {error}") from error
    content = buffer.getvalue()
    names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    classes = [_find(name) for name in sorted(names)]
    paths = [check_nameable(import_path(one)) for one in classes]
    try:
        _load(content, classes)
    except Exception as error:  # find now whatever the reader would fail on
        raise NotPlain(f"it can't be read back as plain structure: {error}") from error
    return content, paths


def decode_skeleton(content: bytes, paths: list[str], file: str) -> nn.Module:
    try:
        skeleton = _load(content, [_import(path, f"a class in {file}") for path in paths])
    except (SetupError, DataError):
        raise
    except Exception as error:  # the unpickler raises several kinds, all meaning the same
        raise DataError(f"{file} can't be read as the structure of a module: {error}") from error
    if not isinstance(skeleton, nn.Module):
        raise DataError(f"{file} holds a {type(skeleton).__name__}, not an nn.Module")
    return skeleton


def _load(content: bytes, classes: list[Any]) -> Any:
    with _SAFE_GLOBALS, torch.serialization.safe_globals(classes):
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _find(name: str) -> Any:
    module_name, _, last = name.rpartition(".")
    found = find_loaded(f"{module_name}:{last}")
    if not _is_buildable(found):
        raise NotPlain(f"it contains {name}, which is not an nn.Module")
    return found


def _import(path: str, wanted_by: str) -> Any:
    found = import_object(path, wanted_by)
    if not _is_buildable(found) and not is_pickle_allowed():
        raise NotPlain(f"it contains {path}, which is not an nn.Module")
    return found


def _is_buildable(value: Any) -> bool:
    """Only module classes, and the functions of torch.nn.functional that layers keep."""
    return is_module_class(value) or is_functional(value)
