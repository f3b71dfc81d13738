"""Tiny models, losses and metrics that can be imported by name, in workers too."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from sparkdml.testing.faults import Injected
from sparkdml.training.callbacks import Callback
from sparkdml.training.training import Training


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


def noisy_classifier() -> nn.Module:
    """Batch statistics and dropout: all that makes a run's bits depend on its past."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    )


class RecordsRows(nn.Module):
    """Remembers the ids of the rows that it is trained on, until `WritesRows` writes them down."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)
        self.ids: list[int] = []

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            self.ids += ids.tolist()
        outputs: Tensor = self.linear(features)
        return outputs


class WritesRows(Callback):
    """Writes a step's rows to a file that names the number of ranks, the step and the rank."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_step_end(self, training: Training) -> None:
        module = training.task.module
        assert isinstance(module, RecordsRows)
        ctx = training.ctx
        path = Path(self.folder, f"{ctx.size}-{training.step}-{ctx.rank}.json")
        path.write_text(json.dumps(module.ids))
        module.ids = []

    def __repr__(self) -> str:
        return "WritesRows()"


class RefusesRows(nn.Module):
    """Raises when it sees a row that is out of bounds; of 64 numbers, as pictures of digits are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1e3).any()):
            raise Injected("a row that can't be read")
        outputs: Tensor = self.linear(x)
        return outputs
