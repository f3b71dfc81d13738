"""From the user's optimizer to what the servers do with a gradient."""

from __future__ import annotations

from typing import Any

import torch

from sparkdml.errors import ParameterError
from sparkdml.server.optimizers import SGD, Adagrad, Adam, Updater


def updater_of(optimizer: torch.optim.Optimizer) -> Updater:
    """The servers' own SGD, Adagrad or Adam with the same settings; others are refused."""
    settings: dict[str, Any] = dict(optimizer.param_groups[0])
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        _refuse(optimizer, settings, "dampening", "maximize")
        return SGD(
            float(settings["lr"]),
            float(settings["momentum"]),
            float(settings["weight_decay"]),
            bool(settings["nesterov"]),
        )
    if kind is torch.optim.Adagrad:
        _refuse(optimizer, settings, "lr_decay", "maximize")
        return Adagrad(
            float(settings["lr"]),
            float(settings["weight_decay"]),
            float(settings["initial_accumulator_value"]),
            float(settings["eps"]),
        )
    if kind is torch.optim.Adam:
        _refuse(optimizer, settings, "amsgrad", "maximize", "decoupled_weight_decay")
        beta1, beta2 = settings["betas"]
        return Adam(
            float(settings["lr"]),
            float(beta1),
            float(beta2),
            float(settings["eps"]),
            float(settings["weight_decay"]),
        )
    raise ParameterError(
        "optimizer",
        kind.__name__,
        "torch.optim.SGD, Adagrad or Adam, which the servers have too",
        "The servers make the steps; give one of these, or updater= to the strategy.",
    )


def _refuse(optimizer: torch.optim.Optimizer, settings: dict[str, Any], *names: str) -> None:
    for name in names:
        if settings.get(name):
            raise ParameterError(
                "optimizer",
                f"{type(optimizer).__name__}({name}={settings[name]!r})",
                f"one without {name}, which the servers don't have",
            )
