"""Plans, rows and references for the tests of objectives."""

from functools import partial

import torch
from torch import nn

from sparkdml.testing.models import (
    NUM_NOISE,
    gan_losses,
    gan_step,
    make_discriminator,
    make_generator,
)
from sparkdml.training.plan import TaskPlan


def make_points(count, seed=0):
    """Points around (2, -1), with noise and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator) * 0.3 + torch.tensor([2.0, -1.0])
    noise = torch.randn(count, NUM_NOISE, generator=generator)
    return {"x": x, "noise": noise, "w": torch.rand(count, generator=generator)}


def interleave(parts, batch_size):
    """What one process is given: every rank's batch of each step, put together."""
    steps = max(-(-len(part["x"]) // batch_size) for part in parts)
    for step in range(steps):
        rows = slice(step * batch_size, (step + 1) * batch_size)
        yield {name: torch.cat([part[name][rows] for part in parts]) for name in parts[0]}


def cut(rows, sizes):
    parts = {name: value.split(sizes) for name, value in rows.items()}
    return [{name: parts[name][i] for name in rows} for i in range(len(sizes))]


def make_plan(**changes):
    fields = {
        "model": lambda: nn.Linear(2, 2),
        "loss": None,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "features": (),
        "label": None,
        "metrics": [],
        "batch_size": 8,
    }
    return TaskPlan(**{**fields, **changes})


def gan_plan(**changes):
    return make_plan(
        **{
            "model": {"generator": make_generator, "discriminator": make_discriminator},
            "optimizer": {
                "generator": partial(torch.optim.Adam, lr=0.02, betas=(0.5, 0.9)),
                "discriminator": partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.9)),
            },
            "step": gan_step,
            **changes,
        }
    )


def train_gan_alone(batches, alternating=False, seed=0):
    """Plain torch: two optimizers, each zeroing and stepping its own module."""
    torch.manual_seed(seed)
    modules = nn.ModuleDict({"generator": make_generator(), "discriminator": make_discriminator()})
    optimizers = {
        "generator": torch.optim.Adam(modules.generator.parameters(), 0.02, (0.5, 0.9)),
        "discriminator": torch.optim.Adam(modules.discriminator.parameters(), 0.01, (0.5, 0.9)),
    }
    for step, batch in enumerate(batches):
        losses = gan_losses(modules, batch["x"], batch["noise"])
        names = list(losses)
        if alternating:
            names = ["generator" if step % 2 else "discriminator"]
        grads = {
            name: torch.autograd.grad(
                losses[name], list(modules[name].parameters()), retain_graph=True
            )
            for name in names
        }
        for name in names:
            for parameter, grad in zip(modules[name].parameters(), grads[name], strict=True):
                parameter.grad = grad
            optimizers[name].step()
    return modules
