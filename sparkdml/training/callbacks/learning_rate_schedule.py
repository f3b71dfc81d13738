"""Learning rates that follow any of torch's schedulers, with warm-up and scaling by the workers.

(Warm-up from the base rate to the scaled one as in Goyal et al. 2017, arXiv 1706.02677.)
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkdml.errors import ParameterError
from sparkdml.history_columns import OPTIMIZER
from sparkdml.training.callbacks.base import Callback, RunFacts, missing_column

if TYPE_CHECKING:
    from sparkdml.training.optimizers import Optimizers
    from sparkdml.training.run import TrainingRun

Factory = Callable[[torch.optim.Optimizer], LRScheduler]


class LearningRateSchedule(Callback):
    """Set the learning rate by a torch scheduler. The history gets a column `lr`.

    With several parameter groups there are `lr_1`, `lr_2`, … for the others; with several
    optimizers `<name>_lr` for each. It is the rate of the epoch's last step.

    Args:
        scheduler: a function of the optimizer, for instance
            `partial(torch.optim.lr_scheduler.StepLR, step_size=10)`; with several optimizers it is
            called for each, or a dict of functions by name. None: warm-up and scaling alone.
        per: call the scheduler after every "step" or after every "epoch".
        warmup_steps: the steps in which the rate rises linearly to the scheduler's value:
            from 0, or with `scale_with_workers` from the rate that one worker would have.
        scale_with_workers: multiply the rate by the number of workers that the run began with.
        monitor: the column of the history that `ReduceLROnPlateau` looks at.
    """

    columns = ("lr", "lr_[0-9]*", f"{OPTIMIZER}_lr", f"{OPTIMIZER}_lr_[0-9]*")

    def __init__(
        self,
        scheduler: Factory | Mapping[str, Factory] | None = None,
        per: Literal["step", "epoch"] = "epoch",
        warmup_steps: int = 0,
        scale_with_workers: bool = False,
        monitor: str | None = None,
    ) -> None:
        if isinstance(scheduler, LRScheduler):
            raise ParameterError(
                "scheduler",
                type(scheduler).__name__,
                "a function of the optimizer, since each worker has an optimizer of its own",
                f"For instance functools.partial(torch.optim.lr_scheduler."
                f"{type(scheduler).__name__}, …).",
            )
        factories = list(scheduler.values()) if isinstance(scheduler, Mapping) else [scheduler]
        if not all(factory is None or callable(factory) for factory in factories):
            raise ParameterError("scheduler", scheduler, "a function (optimizer) -> scheduler")
        if per not in ("step", "epoch"):
            raise ParameterError("per", per, "'step' or 'epoch'")
        if warmup_steps < 0:
            raise ParameterError("warmup_steps", warmup_steps, "0 or more steps")
        if scheduler is None and not warmup_steps and not scale_with_workers:
            raise ParameterError(
                "scheduler", None, "given, or warmup_steps above 0, or scale_with_workers=True"
            )
        self.scheduler, self.per, self.warmup_steps = scheduler, per, warmup_steps
        self.scale_with_workers, self.monitor = scale_with_workers, monitor
        self._schedulers: dict[str, LRScheduler] = {}
        self._scheduled: list[tuple[dict[str, Any], Any]] = []  # what a step has set aside
        self._rates: dict[str, float] = {}  # by column, of the last step
        self._num_workers = 1
        self._has_stepped = False

    def check(self, facts: RunFacts) -> None:
        if self.scheduler is not None:
            self._build(facts.build_optimizers())
        if self.monitor is not None:
            facts.check_monitor("LearningRateSchedule", self.monitor)

    def on_run_start(self, training: TrainingRun) -> None:
        self._schedulers = self._build(training.task.optimizers)
        self._num_workers = training.ctx.size if self.scale_with_workers else 1
        self._has_stepped = False
        self._note_rates(training.task.optimizers, self._factor(training.step))
        training.note(self._describe(training.task.optimizers))

    def on_gradient(self, training: TrainingRun) -> None:
        """The rate of this step alone: schedulers compute the next one from the last."""
        self._put_back()  # a strategy may take several steps of its own before one is counted
        optimizers, factor = training.task.optimizers, self._factor(training.step)
        if factor != 1.0:
            for optimizer in optimizers.values():
                for group in optimizer.param_groups:
                    self._scheduled.append((group, group["lr"]))
                    group["lr"] = group["lr"] * factor

    def on_step_end(self, training: TrainingRun) -> None:
        self._put_back()
        self._note_rates(training.task.optimizers, self._factor(training.step - 1))
        if self.per == "step":
            self._step_all()

    def _put_back(self) -> None:
        for group, rate in self._scheduled:
            group["lr"] = rate
        self._scheduled = []

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        row.update(self._rates)
        if self.per == "step":
            return
        if self.monitor is None:
            self._step_all()
            return
        if self.monitor not in row:
            raise missing_column("LearningRateSchedule", self.monitor, row)
        for name, scheduler in self._schedulers.items():
            assert isinstance(scheduler, ReduceLROnPlateau), "checked when it was built"
            before = [group["lr"] for group in scheduler.optimizer.param_groups]
            scheduler.step(row[self.monitor])
            after = [group["lr"] for group in scheduler.optimizer.param_groups]
            if before != after:
                training.note(
                    f"learning rate{f' of {name}' if name else ''}: {float(before[0]):g} -> "
                    f"{float(after[0]):g}, since {self.monitor} no longer improves"
                )

    def state(self) -> dict[str, Any]:
        return {
            "num_workers": self._num_workers,
            "rates": dict(self._rates),
            "has_stepped": self._has_stepped,
            "schedulers": {name: _plain(s.state_dict()) for name, s in self._schedulers.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._num_workers, self._rates = state["num_workers"], dict(state["rates"])
        self._has_stepped = state["has_stepped"]
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(_like(scheduler.state_dict(), state["schedulers"][name]))

    # -- how rates come about -------------------------------------------------------------------

    def _factor(self, step: int) -> float:
        """What the scheduler's rate is multiplied by in the step after `step` others."""
        start, end = (1.0, float(self._num_workers)) if self.scale_with_workers else (0.0, 1.0)
        if step + 1 >= self.warmup_steps:
            return end
        return start + (end - start) * (step + 1) / self.warmup_steps

    def _note_rates(self, optimizers: Optimizers, factor: float) -> None:
        self._rates = {
            _column(name, index): float(group["lr"]) * factor
            for name, optimizer in optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
        }

    def _step_all(self) -> None:
        if self._has_stepped:
            for scheduler in self._schedulers.values():
                scheduler.step()
            return
        self._has_stepped = True
        with warnings.catch_warnings():
            # An optimizer may not have moved yet, and torch suspects a mistake.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer")
            for scheduler in self._schedulers.values():
                scheduler.step()

    def _build(self, optimizers: Optimizers) -> dict[str, LRScheduler]:
        if self.scheduler is None:
            return {}
        factories = self.scheduler
        if not isinstance(factories, Mapping):
            factories = dict.fromkeys(optimizers, factories)
        unknown = [name for name in factories if name not in optimizers]
        if unknown:
            names = ", ".join(name for name in optimizers if name) or "none: there is but one"
            raise ParameterError("scheduler", unknown[0], f"by the optimizers' names: {names}")
        built = {name: factory(optimizers[name]) for name, factory in factories.items()}
        for scheduler in built.values():
            self._check_scheduler(scheduler)
        return built

    def _check_scheduler(self, scheduler: Any) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise ParameterError(
                "scheduler", type(scheduler).__name__, "a function that makes a torch scheduler"
            )
        is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        if is_plateau and (self.monitor is None or self.per != "epoch"):
            raise ParameterError(
                "LearningRateSchedule(monitor, per)",
                (self.monitor, self.per),
                "a column of the history and 'epoch' for ReduceLROnPlateau",
                "For instance monitor='val_loss', per='epoch'.",
            )
        if not is_plateau and self.monitor is not None:
            raise ParameterError(
                "LearningRateSchedule(monitor)",
                self.monitor,
                f"left out, since {type(scheduler).__name__} looks at no number",
            )

    def _describe(self, optimizers: Optimizers) -> str:
        base = ", ".join(
            f"{f'{name} ' if name else ''}{float(optimizer.param_groups[0]['lr']):g}"
            for name, optimizer in optimizers.items()
        )
        text = f"learning rate: {base}"
        if self.scale_with_workers:
            text += f", times {self._num_workers} workers"
        if self.warmup_steps:
            origin = "that of one worker" if self.scale_with_workers else "0"
            text += f", reached from {origin} in {self.warmup_steps:,} steps"
        kinds = sorted({type(scheduler).__name__ for scheduler in self._schedulers.values()})
        return text + (f", then by {', '.join(kinds)} per {self.per}" if kinds else "")

    def __repr__(self) -> str:
        from sparkdml.checkpoint.fingerprint import describe

        return (
            f"LearningRateSchedule({describe(self.scheduler)}, per={self.per!r}, "
            f"warmup_steps={self.warmup_steps}, scale_with_workers={self.scale_with_workers}, "
            f"monitor={self.monitor!r})"
        )


def _column(name: str, group: int) -> str:
    column = f"{name}_lr" if name else "lr"
    return f"{column}_{group}" if group else column


def _plain(value: Any) -> Any:
    """What a checkpoint can hold of a scheduler's state; it has its functions already."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        return [None if callable(item) else _plain(item) for item in value]
    return value


def _like(present: Any, saved: Any) -> Any:
    """The saved state in the types that the scheduler has now."""
    if isinstance(present, Counter):
        return Counter(saved)
    if isinstance(present, dict):
        return {key: _like(present.get(key), item) for key, item in saved.items()}
    if isinstance(present, list | tuple) and len(present) == len(saved):
        return type(present)(_like(a, b) for a, b in zip(present, saved, strict=True))
    return saved
