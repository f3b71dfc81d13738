"""Small models, losses, metrics and callbacks that workers can import by name.

The custom objectives (a GAN, an auto-encoder, a contrastive model) expect columns `x` (two numbers)
and `noise`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparkdml.factories import factory
from sparkdml.feed.batch import Batch
from sparkdml.testing.faults import Injected
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import StepContext
from sparkdml.training.run import TrainingRun


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
    """Two layers that share one weight, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4, bias=False)
        self.up = nn.Linear(4, 4, bias=False)
        self.up.weight = self.down.weight
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.up(self.down(features) * self.scale)
        return outputs


@factory
def make_classifier() -> nn.Module:
    """Return a `TinyClassifier`."""
    return TinyClassifier()


@factory
def make_wider(hidden: int) -> nn.Module:
    """Return a `TinyClassifier` of another width."""
    return TinyClassifier(hidden)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


class CountEpochs(Callback):
    """A callback with an argument, which persistence saves, and other state, which it does not."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.count = start

    def on_epoch_end(self, training: object, row: dict[str, float]) -> None:
        self.count += 1


@factory
def noisy_classifier() -> nn.Module:
    """A model with batch statistics and dropout, whose results depend on the run's history."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
    )


class RecordsRows(nn.Module):
    """Records the ids of the rows that it is trained on, for `WritesRows` to write."""

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

    def on_step_end(self, training: TrainingRun) -> None:
        module = training.task.module
        assert isinstance(module, RecordsRows)
        ctx = training.ctx
        path = Path(self.folder, f"{ctx.size}-{training.step}-{ctx.rank}.json")
        path.write_text(json.dumps(module.ids))
        module.ids = []

    def __repr__(self) -> str:
        return "WritesRows()"


class RefusesRows(nn.Module):
    """Raises on a row that is out of bounds; rows have 64 numbers, like the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 1e3).any()):
            raise Injected("a row that can't be read")
        outputs: Tensor = self.linear(x)
        return outputs


NUM_NOISE = 2


def make_generator() -> nn.Module:
    return nn.Linear(NUM_NOISE, 2)


def make_discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def gan_losses(modules: Any, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
    fake = modules.generator(noise)
    judged_real, judged_fake = modules.discriminator(real), modules["discriminator"](fake.detach())
    return {
        "discriminator": F.softplus(-judged_real).mean() + F.softplus(judged_fake).mean(),
        # Its gradient passes through the discriminator, and must not stay there.
        "generator": F.softplus(-modules.discriminator(fake)).mean(),
    }


def gan_step(modules: Any, batch: Batch, ctx: StepContext) -> dict[str, Tensor]:
    """Both at once."""
    return gan_losses(modules, batch["x"], batch["noise"])


def alternating_step(modules: Any, batch: Batch, ctx: StepContext) -> dict[str, Tensor]:
    """The discriminator in even steps, the generator in odd ones."""
    losses = gan_losses(modules, batch["x"], batch["noise"])
    name = "generator" if ctx.step % 2 else "discriminator"
    return {name: losses[name]} if ctx.training else losses


def make_autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))


def autoencoder_step(
    module: Any, batch: Batch, ctx: StepContext
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """Return one value per row, and two numbers beside it."""
    code = module[0](batch["x"])
    error = ((module[1](code) - batch["x"]) ** 2).mean(dim=1)
    return error, {"code_size": code.abs(), "is_training": float(ctx.training)}


def make_embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def contrastive_step(module: Any, batch: Batch, ctx: StepContext) -> Tensor:
    """Two noisy views of a point should be closer to each other than to other points."""
    first = F.normalize(module(batch["x"] + 0.05 * batch["noise"]), dim=1)
    second = F.normalize(module(batch["x"] - 0.05 * batch["noise"]), dim=1)
    scores = first @ second.T / 0.2
    return F.cross_entropy(scores, torch.arange(batch.num_rows), reduction="none")
