"""A model's buffers on the servers, for an evaluator: BatchNorm's statistics and the like.

They are no parameters: every worker has its own, and they are merged as an epoch ends. Within an
epoch those of the first worker stand for all, as they do in data-parallel training elsewhere. It
pushes by how much they have changed, with each gradient, so that they belong to the same clock.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparkdml.server.client import WorkerClient
from sparkdml.server.optimizers import Add

BUFFERS = "buffers"


def flat_buffers(module: nn.Module) -> Tensor | None:
    """Those that are not whole numbers, one behind the other; None if there are none."""
    found = [buffer.detach().reshape(-1) for buffer in _floating(module)]
    return torch.cat([each.to("cpu", torch.float64) for each in found]) if found else None


def load_buffers(module: nn.Module, flat: Tensor) -> None:
    """The inverse."""
    start = 0
    for buffer in _floating(module):
        stop = start + buffer.numel()
        buffer.copy_(flat[start:stop].view(buffer.shape))
        start = stop


def _floating(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]


class ToldBuffers:
    """What the first worker has told of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._initial = module, flat_buffers(module)
        self._told = self._initial
        self._client: WorkerClient | None = None

    def tell(self, client: WorkerClient) -> None:
        """Before a clock ends; `client` may be another in each epoch."""
        if self._initial is None:
            return
        if client is not self._client:
            self._client = client
            client.init(BUFFERS, self._initial, updater=Add(), exact=True)
            self._told = client.pull(BUFFERS).wait().clone()
        now = flat_buffers(self._module)
        assert now is not None
        assert self._told is not None
        # Infinities that stay, as in masks, are no change; their difference would be NaN.
        change = torch.where(now == self._told, 0.0, now - self._told)
        self._told = now
        if change.any():  # most models have none, or constant ones
            client.push(BUFFERS, change)
