"""A small data set: scikit-learn's digits, split into parts, and a model that learns them fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sparkdml.testing.models import accuracy
from sparkdml.testing.threads import Rows
from sparkdml.training.task import TaskPlan


@lru_cache(maxsize=1)
def _all_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def digits(count: int = 400) -> Rows:
    """The first `count` of 1,797 pictures of 64 points, `x`, with their labels `y`."""
    images, labels = _all_digits()
    return {"x": images[:count], "y": labels[:count]}


def cut(rows: Rows, sizes: Sequence[int]) -> list[Rows]:
    """Split the first rows into parts of these sizes, one per rank."""
    parts, start = [], 0
    for size in sizes:
        parts.append({name: value[start : start + size] for name, value in rows.items()})
        start += size
    return parts


def combined_batches(parts: Sequence[Rows], batch_size: int) -> Iterator[Rows]:
    """Yield the batches of an equivalent single process: all ranks' batches of a step, joined."""
    num_steps = max(-(-len(next(iter(part.values()))) // batch_size) for part in parts)
    for step in range(num_steps):
        rows = slice(step * batch_size, (step + 1) * batch_size)
        yield {name: torch.cat([part[name][rows] for part in parts]) for name in parts[0]}


def make_reader() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def make_normed_reader() -> nn.Module:
    """With BatchNorm's buffers."""
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 10))


def digits_plan(lr: float = 0.5, momentum: float = 0.0, **changes: Any) -> TaskPlan:
    fields: dict[str, Any] = {
        "model": make_reader,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=lr, momentum=momentum),
        "features": ("x",),
        "label": "y",
        "metrics": {"accuracy": accuracy},
        "batch_size": 8,
    }
    return TaskPlan(**{**fields, **changes})


def loss_of(module: nn.Module, rows: Rows) -> float:
    """The mean loss of all rows, without training on them."""
    was_training = module.training
    module.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module(rows["x"]), rows["y"]).item()
    module.train(was_training)
    return loss
