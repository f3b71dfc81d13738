"""Autocast, and the loss scale that keeps half-precision gradients from vanishing.

The scale is a function of the agreed gradients alone, so all ranks have the same one without a
word; ranks that take steps of their own agree on one when they meet, or at an epoch's end.
(Micikevicius et al. 2018, arXiv 1710.03740.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.training.plan import Precision

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_INTERVAL = 2000  # good steps before a larger scale is tried


class Autocast:
    """A context for forward passes: the operations that bear it run in half precision."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._kind = _TYPES.get(precision)
        self._device = device.type
        self.is_on = self._kind is not None

    def __call__(self) -> AbstractContextManager[Any]:
        if self._kind is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._kind)


class LossScale:
    """Doubles after many good steps; halves after a step whose gradients overflowed."""

    def __init__(self, batch_size: int) -> None:
        # Gradients are summed over the rows, not averaged, so a batch needs a smaller scale.
        self.value = 2.0 ** max(0, 16 - math.ceil(math.log2(batch_size)))
        self.good_steps = 0
        self.skipped_steps = 0  # in the whole run

    def accepts(self, grads: Tensor) -> bool:
        """Whether the agreed gradients can be applied; adapts the scale for the next step."""
        if not bool(torch.isfinite(grads).all()):
            self.value = max(self.value / 2, 2.0**-24)
            self.good_steps = 0
            self.skipped_steps += 1
            return False
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value = min(self.value * 2, 2.0**24)
            self.good_steps = 0
        return True

    def agree(self, comm: Communicator, device: torch.device) -> None:
        """Where each rank has taken steps of its own: go on with the smallest scale of all."""
        numbers = [self.value, self.good_steps, -self.skipped_steps]
        own = torch.tensor(numbers, dtype=torch.float64, device=device)
        value, good, skipped = comm.allreduce_(own, "min").tolist()
        self.value, self.good_steps, self.skipped_steps = value, int(good), -int(skipped)

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def load(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
