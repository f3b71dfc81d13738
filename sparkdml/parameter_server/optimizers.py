"""Updaters: how servers apply a push, by adding it or as a gradient (SGD, Adagrad, Adam).

Pure functions over one part of a table: values of shape (rows, width), a gradient of the same
shape, and `slots`, the tensors that the updater remembers. Dense updates equal torch's own.

Sparse updates are lazy: rows that a push doesn't name keep their values and their slots as they
are. So momentum does not move, weight decay does not shrink, and Adam's moments do not fade in a
row until it is pushed again; in a table of rows Adam counts the steps of each row for itself.
(Adagrad: Duchi et al. 2011; Adam: Kingma and Ba 2015, arXiv 1412.6980.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdml.errors import ParameterError

Slots = dict[str, Tensor]


@dataclass(frozen=True)
class Updater(ABC):
    """The rule of one table."""

    # Whether pushes commute and can be added up before they are sent, without their weights.
    additive = False

    @abstractmethod
    def slots(self, values: Tensor, by_row: bool) -> Slots:
        """What it remembers of a part, before the first update."""

    @abstractmethod
    def update(self, values: Tensor, gradient: Tensor, slots: Slots) -> None:
        """One step, in place."""

    def update_rows(self, values: Tensor, rows: Tensor, gradient: Tensor, slots: Slots) -> None:
        """One step for some rows, each of which is named once."""
        chosen = values[rows]
        # A slot of one row is shared by the whole part.
        own = {name: slot[rows] if slot.shape[0] > 1 else slot for name, slot in slots.items()}
        self.update(chosen, gradient, own)
        values[rows] = chosen
        for name, slot in own.items():
            if slots[name].shape[0] > 1:
                slots[name][rows] = slot

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class Add(Updater):
    """values += push: counts, factors, anything whose updates are differences."""

    additive = True

    def slots(self, values: Tensor, by_row: bool) -> Slots:
        return {}

    def update(self, values: Tensor, gradient: Tensor, slots: Slots) -> None:
        values.add_(gradient)


@dataclass(frozen=True)
class SGD(Updater):
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not self.momentum:
            raise ParameterError("nesterov", True, "used with a momentum", "Set momentum=0.9.")

    def slots(self, values: Tensor, by_row: bool) -> Slots:
        return {"momentum": torch.zeros_like(values)} if self.momentum else {}

    def update(self, values: Tensor, gradient: Tensor, slots: Slots) -> None:
        if self.weight_decay:
            gradient = gradient.add(values, alpha=self.weight_decay)
        if self.momentum:
            # Zero at first, so that the first step's buffer is the gradient itself, as torch's.
            moving = slots["momentum"].mul_(self.momentum).add_(gradient)
            gradient = gradient.add(moving, alpha=self.momentum) if self.nesterov else moving
        values.add_(gradient, alpha=-self.lr)


@dataclass(frozen=True)
class Adagrad(Updater):
    lr: float = 0.01
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _check_not_negative(
            lr=self.lr,
            weight_decay=self.weight_decay,
            initial_accumulator=self.initial_accumulator,
            eps=self.eps,
        )

    def slots(self, values: Tensor, by_row: bool) -> Slots:
        return {"sum": torch.full_like(values, self.initial_accumulator)}

    def update(self, values: Tensor, gradient: Tensor, slots: Slots) -> None:
        if self.weight_decay:
            gradient = gradient.add(values, alpha=self.weight_decay)
        seen = slots["sum"].addcmul_(gradient, gradient)
        values.addcdiv_(gradient, seen.sqrt().add_(self.eps), value=-self.lr)


@dataclass(frozen=True)
class Adam(Updater):
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ParameterError(name, value, "at least 0 and below 1")

    def slots(self, values: Tensor, by_row: bool) -> Slots:
        return {
            "step": torch.zeros((len(values), 1) if by_row else (1, 1), dtype=torch.float64),
            "mean": torch.zeros_like(values),
            "square": torch.zeros_like(values),
        }

    def update(self, values: Tensor, gradient: Tensor, slots: Slots) -> None:
        if self.weight_decay:
            gradient = gradient.add(values, alpha=self.weight_decay)
        step = slots["step"].add_(1)
        mean = slots["mean"].lerp_(gradient, 1 - self.beta1)
        square = slots["square"].mul_(self.beta2)
        square.addcmul_(gradient, gradient, value=1 - self.beta2)
        # The corrections in double precision: 1 - 0.999 has few digits in a float.
        scale = (1 - self.beta2**step).sqrt().to(values.dtype)
        rate = (self.lr / (1 - self.beta1**step)).to(values.dtype)
        values.sub_(rate * (mean / (square.sqrt() / scale).add_(self.eps)))


UPDATERS: dict[str, type[Updater]] = {kind.__name__: kind for kind in (Add, SGD, Adagrad, Adam)}


def updater_from(fields: Mapping[str, Any]) -> Updater:
    """The inverse of `to_dict`; a ParameterError for anything else."""
    given = dict(fields)
    kind = UPDATERS.get(str(given.pop("kind", None)))
    if kind is None:
        raise ParameterError("updater", fields, f"one of {', '.join(UPDATERS)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ParameterError("updater", fields, f"the arguments of {kind.__name__}") from error


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ParameterError(name, value, "at least 0")
