"""Separates a module from its weights: a skeleton of meta tensors is small and can be shipped.

Everything but the state (buffers that are not saved, plain attributes) stays in the skeleton. Made
at the driver, filled in the workers. Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Inseparable(Exception):
    """A module's structure can't be separated from its weights; the message says why."""


def make_skeleton(module: nn.Module) -> nn.Module:
    """Return the module without the content of its state. Tied weights stay tied."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor) or isinstance(value, nn.UninitializedParameter):
            raise Inseparable(f"its state {name!r} is not a tensor of a known shape")
    try:
        skeleton = _replace(module, {id(v): empty_like(v, "meta") for v in state.values()})
    except Exception as error:  # a module's own __deepcopy__ may raise anything
        raise Inseparable(f"it can't be copied: {error}") from error
    if _shapes(skeleton) != _shapes(module):
        raise Inseparable("its copy has a different state")
    return skeleton


def fill(skeleton: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a module whose parameters and buffers are these very tensors, not copies."""
    replacements: dict[int, Tensor] = {}
    for name, empty in skeleton.state_dict(keep_vars=True).items():
        tensor = state[name]
        if isinstance(empty, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=empty.requires_grad)
        replacements.setdefault(id(empty), tensor)
    return _replace(skeleton, replacements)


def allocate(skeleton: nn.Module) -> nn.Module:
    """Return a module with memory for its state, uninitialized."""
    state: dict[str, Tensor] = skeleton.state_dict(keep_vars=True)
    return _replace(skeleton, {id(v): empty_like(v, "cpu") for v in state.values()})


def check_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise torch's own RuntimeError if the state does not fit the module."""
    try:
        skeleton = make_skeleton(module)
    except Inseparable:
        module.load_state_dict(state)
    else:
        skeleton.load_state_dict(state, assign=True)


def empty_like(tensor: Tensor, device: str) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _replace(module: nn.Module, replacements: dict[int, Tensor]) -> nn.Module:
    """Return a deep copy with some tensors replaced; a shared tensor stays shared."""
    memo: dict[int, Any] = dict(replacements)
    return copy.deepcopy(module, memo)


def _shapes(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in module.state_dict().items()}
