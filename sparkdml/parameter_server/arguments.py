"""Checks a parameter server's arguments against its consistency model and the optimizer.

Pure functions, called at the driver before any job; `updater_of`, which translates the user's
optimizer into the servers' own, is called in workers too.
"""

from __future__ import annotations

from typing import Any

import torch

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.consistency import Consistency, Expulsion
from sparkdml.parameter_server.optimizers import SGD, Adagrad, Adam, Updater


def may_overlap(consistency: Consistency, updater: Updater) -> bool:
    """Whether a worker may compute on a model that lacks others' last updates, but not its own.

    A momentum, and what Adagrad and Adam remember, is of all workers' gradients, on the servers.
    """
    is_plain = isinstance(updater, SGD) and not updater.momentum
    return is_plain and not consistency.aggregates


def check_overlap(overlap: bool | None, consistency: Consistency) -> None:
    if overlap and consistency.aggregates:
        raise ParameterError(
            "overlap",
            overlap,
            f"None or False with {consistency!r}: each gradient is computed on the latest model",
            "Use consistency=SSP(), ASP() or TAP().",
        )


def check_overlap_with(overlap: bool | None, updater: Updater) -> None:
    if overlap and (not isinstance(updater, SGD) or updater.momentum):
        raise ParameterError(
            "overlap",
            overlap,
            f"None or False with {updater!r}: a worker can't make such a step by itself",
            "Use SGD without momentum.",
        )


def check_expulsion(consistency: Consistency, expulsion: Expulsion | None) -> None:
    """Check that the consistency model waits for workers, as `expulsion` requires."""
    if expulsion is not None and not isinstance(expulsion, Expulsion):
        raise ParameterError("expulsion", expulsion, "Expulsion(…) or None")
    if expulsion is not None and not consistency.waits:
        raise ParameterError(
            "expulsion",
            expulsion,
            f"None with {consistency!r}, under which no worker waits for a slow one",
            "Leave it out, or use consistency=BSP() or SSP().",
        )
    if expulsion is None and consistency.stands_in:
        raise ParameterError(
            "consistency",
            consistency,
            "one without stand_in, unless expulsion is set,",
            "Give expulsion=Expulsion(), which says when one is.",
        )


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
