"""Totals of steps over rows and ranks, besides the gradients, and progress in an epoch.

The totals of a step are one short vector of numbers. Its layout is that of `stats` everywhere: the
fixed numbers first, then one sum for each metric, then a weight and a sum for each of several
losses. An epoch's row of the history, and a checkpoint, are made of its `EpochProgress`, which
belongs to the loop of one worker, and is read and written on its thread alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparkdml.feed.order import Ints

NUM_FIXED_STATS = 6  # weight, rows, loss, and the votes: wishes, objections, stops
ROWS, LOSS = 1, 2
VOTES = slice(3, 6)

_TINY = 1e-30  # the totals of nothing have means of nothing, not a division by zero


@dataclass(slots=True)  # not frozen, which takes three times as long: a step makes two of them
class Totals:
    """Sums over rows. They add up over steps and ranks; only a person wants their means.

    Never changed once made.

    Attributes:
        weight: of the rows, by which gradients and the loss are divided.
        rows: how many.
        loss: the weighted sum.
        metrics: a sum for each, in the order of `metrics=`.
        wishes, objections, stops: how many ranks wish for a checkpoint, object to one, want to end.
    """

    weight: float = 0.0
    rows: float = 0.0
    loss: float = 0.0
    metrics: tuple[float, ...] = ()
    # How many ranks wish for a checkpoint, and how many object, being busy with the last one; and
    # how many want to end the run after this step. They travel with the sums, so that all ranks
    # decide alike and no message is spent on it.
    wishes: float = 0.0
    objections: float = 0.0
    stops: float = 0.0
    # Where each optimizer has a loss of its own: theirs, in the optimizers' order. `weight` is 0.
    weights: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()

    def __add__(self, other: Totals) -> Totals:
        if not self.rows:
            return other  # the totals of nothing don't know how many metrics there are
        if not other.rows:
            return self
        return Totals(
            weight=self.weight + other.weight,
            rows=self.rows + other.rows,
            loss=self.loss + other.loss,
            metrics=_add(self.metrics, other.metrics),
            weights=_add(self.weights, other.weights),
            losses=_add(self.losses, other.losses),
        )

    @classmethod
    def load(cls, saved: dict[str, Any]) -> Totals:
        """From what `asdict` made of them; a checkpoint has lists in place of tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in saved.items()
        }
        return cls(**fields)

    @classmethod
    def of(cls, stats: Sequence[float], num_losses: int = 0) -> Totals:
        """From a vector of stats, of a task with the given number of named losses."""
        weight, rows, loss, wishes, objections, stops, *rest = stats
        num_metrics = len(rest) - 2 * num_losses
        return cls(
            weight=weight,
            rows=rows,
            loss=loss,
            metrics=tuple(rest[:num_metrics]),
            wishes=wishes,
            objections=objections,
            stops=stops,
            weights=tuple(rest[num_metrics::2]) if num_losses else (),
            losses=tuple(rest[num_metrics + 1 :: 2]) if num_losses else (),
        )

    def without_votes(self) -> Totals:
        """For those who keep them: a vote is of its step alone."""
        return replace(self, wishes=0.0, objections=0.0, stops=0.0)

    @property
    def mean_loss(self) -> float:
        """The weighted mean; of several losses the sum of their means."""
        if self.losses and not self.weight:
            return sum(self.mean_losses)
        return self.loss / max(self.weight, _TINY)

    @property
    def mean_losses(self) -> tuple[float, ...]:
        return tuple(
            loss / max(weight, _TINY)
            for loss, weight in zip(self.losses, self.weights, strict=True)
        )

    def means(self, metrics: Iterable[str], losses: Iterable[str] = ()) -> dict[str, float]:
        """By name, as the history has them; nan where there were no rows."""
        if not self.rows:  # the totals of nothing don't know how many metrics there are
            return dict.fromkeys(["loss", *(f"{name}_loss" for name in losses), *metrics], math.nan)
        named = zip(losses, self.mean_losses, strict=True)
        measured = zip(metrics, self.metrics, strict=True)
        return {
            "loss": self.mean_loss,
            **{f"{name}_loss": value for name, value in named},
            **{name: value / self.rows for name, value in measured},
        }


def _add(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    if not one and not other:
        return ()  # as in most steps
    return tuple(a + b for a, b in zip(one, other, strict=True))


class Sums:
    """A vector of stats that batches are added to, in every step: so it must cost next to nothing.

    Numbers in a memoryview are changed in a tenth of the time that numpy takes for its own, which
    takes a tenth of torch's.
    """

    def __init__(self, stats: Tensor) -> None:
        self._stats = stats
        content: Any = stats.numpy() if stats.device.type == "cpu" else None
        self._view: Any = None if content is None else memoryview(content)

    def add(self, values: list[Tensor | float]) -> None:
        if self._view is None:
            device = self._stats.device
            self._stats += torch.stack([torch.as_tensor(value, device=device) for value in values])
            return
        for index, value in enumerate(values):
            self._view[index] += float(value)


class EpochProgress:
    """Counted from where the epoch begins on this rank.

    Args:
        number: counted from 0.
        start: where in this rank's rows it begins, if not at their start.
        rows_before: how many of them this rank had trained on before that, in a run that was
            resumed. Where the number of ranks has changed it is the mean of what they had, which
            may be a fraction of a row.
    """

    def __init__(self, number: int, start: Ints | None = None, rows_before: float = 0.0) -> None:
        self.number = number
        self.start = start
        self.rows_before = rows_before
        self.totals = Totals()
        self.steps = 0
        self.measured: dict[str, float] = {}  # what the strategy adds to the row, on every rank
        self.rows_here = 0  # that this rank has trained on since the epoch began here
        # Of this rank's shards: how many rows any rank has used since it began here, where other
        # ranks may train on them.
        self.used_rows: int | None = None
        self._seconds_before = 0.0
        self._started = time.perf_counter()

    def state(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "totals": asdict(self.totals),
            "steps": self.steps,
            "seconds": self.seconds,
            "measured": self.measured,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state of the same epoch."""
        assert state["number"] == self.number
        self.totals = Totals.load(state["totals"])
        self.steps = state["steps"]
        self._seconds_before = state["seconds"]
        self.measured = dict(state.get("measured", {}))  # which older checkpoints have not

    @property
    def own_rows(self) -> float:
        """Of this rank, for its weight among the others."""
        return self.rows_before + self.rows_here

    @property
    def rows_read(self) -> int:
        """How many rows of this rank's shards have been used since the epoch began here."""
        return self.rows_here if self.used_rows is None else self.used_rows

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started
