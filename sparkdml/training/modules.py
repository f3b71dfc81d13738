"""Modules from what the user gave: one, or several by name in one container."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sparkdml.errors import ParameterError, SetupError
from sparkdml.training.plan import ModelSource


class Modules(nn.ModuleDict):
    """Several modules by name: `modules["generator"]` and `modules.generator` are the same."""


def build_module(model: ModelSource) -> nn.Module:
    """The module itself, or what the function makes; of several, a container."""
    if not isinstance(model, Mapping):
        return _build_one("model", model)
    modules = Modules()
    for name, source in model.items():
        _check_name(modules, name)
        modules[name] = _build_one(f"model[{name!r}]", source)
    if not modules:
        raise ParameterError("model", "{}", "a module, or at least one by name")
    return modules


def floating_type(module: nn.Module) -> str:
    """As what floating-point columns are read: the module's own type, where numpy has it."""
    kinds = (parameter.dtype for parameter in module.parameters())
    kind = str(next(kinds, torch.float32)).removeprefix("torch.")
    return kind if kind in ("float32", "float64") else "float32"  # the task casts to bfloat16


def _build_one(parameter: str, source: Any) -> nn.Module:
    module = source if isinstance(source, nn.Module) or not callable(source) else source()
    if not isinstance(module, nn.Module):
        raise ParameterError(
            parameter,
            type(module).__name__,
            "an nn.Module, or a function of no arguments that makes one",
        )
    return module


def _check_name(modules: Modules, name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ParameterError("model", name, "a dict whose keys are names, as of variables")
    if hasattr(modules, name):
        raise ParameterError(
            "model", name, "a dict whose keys are no attributes of nn.Module", "Rename it."
        )


def compile_module(module: nn.Module, options: bool | Mapping[str, Any]) -> None:
    """In place, so that the names of the parameters stay; of several, each by itself."""
    if options is False:
        return
    arguments = {} if options is True else dict(options)
    if arguments.get("backend", "inductor") == "inductor":
        check_compiler(next(module.parameters()).device)
    for part in module.children() if isinstance(module, Modules) else [module]:
        part.compile(**arguments)


def check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for the CPU; without a compiler it fails far from the cause."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise SetupError(
            f"compile= needs a C++ compiler, and the worker has no {compiler}. Install one on "
            "every worker, name it by CXX, or set compile=False or compile={'backend': 'eager'}"
        )


def check_compile_options(options: bool | Mapping[str, Any]) -> None:
    if isinstance(options, bool):
        return
    known = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ParameterError(
            "compile",
            unknown[0],
            f"True, False, or a dict of torch.compile's arguments: {', '.join(known)}",
        )
