"""A module's state as it is kept: as bytes, as the state that training starts from, as a digest.

Pure functions, called at the driver (saving, warm start) and in workers (the result of a run).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor, nn


def encode_weights(module: nn.Module) -> bytes:
    """The module's state as safetensors. Tied weights are written out one by one."""
    state = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in module.state_dict().items()
    }
    return safetensors.torch.save(state)


def load_weights(module: nn.Module, weights: bytes) -> nn.Module:
    module.load_state_dict(safetensors.torch.load(weights))
    return module


def load_state(module: nn.Module, state: Mapping[str, Tensor] | None) -> nn.Module:
    """The module with these weights, in its own types; unchanged if there are none."""
    if state is not None:
        with torch.no_grad():
            for name, own in module.state_dict(keep_vars=True).items():
                own.copy_(state[name])
    return module


def describe_state(state: Mapping[str, Tensor]) -> str:
    """A digest that is the same for the same weights."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"weights {digest.hexdigest()[:12]}"
