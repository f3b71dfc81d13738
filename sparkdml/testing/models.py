"""Tiny models, losses and metrics that can be imported by name, for tests of saving."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparkdml.training.callbacks import Callback


class TinyClassifier(nn.Module):
    """Four numbers to one of three classes."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, hidden)
        self.out = nn.Linear(hidden, 3)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.out(torch.relu(self.hidden(features)))
        return outputs


class TiedAutoencoder(nn.Module):
    """Two layers that share one weight, and a buffer that the state does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4, bias=False)
        self.up = nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.up(self.down(features) * self.scale)
        return outputs


def make_classifier() -> nn.Module:
    """The same by a function."""
    return TinyClassifier()


def make_wider(hidden: int) -> nn.Module:
    """The same by a function that needs an argument."""
    return TinyClassifier(hidden)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


class CountEpochs(Callback):
    """A callback that keeps its argument as Spark's persistence wants it, and one thing more."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.count = start

    def on_epoch_end(self, training: object, row: dict[str, float]) -> None:
        self.count += 1
