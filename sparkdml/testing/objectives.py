"""Objectives that are no (outputs, targets): a GAN, an auto-encoder, a contrastive model.

Tiny, and importable by name in workers too. They expect columns `x` (two numbers) and `noise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparkdml.feed.batch import Batch
from sparkdml.training.step_function import StepContext

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
    """One value a row, and two numbers beside it."""
    code = module[0](batch["x"])
    error = ((module[1](code) - batch["x"]) ** 2).mean(dim=1)
    return error, {"code_size": code.abs(), "is_training": float(ctx.training)}


def make_embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def contrastive_step(module: Any, batch: Batch, ctx: StepContext) -> Tensor:
    """Two noisy views of a point are nearer to each other than to other points of the batch."""
    first = F.normalize(module(batch["x"] + 0.05 * batch["noise"]), dim=1)
    second = F.normalize(module(batch["x"] - 0.05 * batch["noise"]), dim=1)
    scores = first @ second.T / 0.2
    return F.cross_entropy(scores, torch.arange(batch.num_rows), reduction="none")
