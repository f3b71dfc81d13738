"""The interface of callbacks.

`check` runs at the driver, before any job. The hooks run in every worker, on the loop's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdml.errors import ParameterError

if TYPE_CHECKING:
    from torch import nn

    from sparkdml.training.optimizers import Optimizers
    from sparkdml.training.plan import TaskPlan
    from sparkdml.training.run import TrainingRun


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run at the driver, before it begins."""

    plan: TaskPlan
    module: nn.Module
    columns: frozenset[str]  # of the history, but for those that callbacks may add
    is_complete: bool  # whether no callback of the user's may add a column

    def build_optimizers(self) -> Optimizers:
        """As they would be in a worker. The first one in a process takes torch a second or more."""
        from sparkdml.training.optimizers import Optimizers

        return Optimizers(self.plan.optimizer, self.module, self.plan.parameter_groups)

    def check_monitor(self, owner: str, monitor: str) -> None:
        """Find a column that can't be there before an epoch has been trained in vain."""
        is_misnamed = self.is_complete and monitor not in self.columns
        needs_validation = (
            monitor.startswith("val_")
            and monitor not in self.columns
            and monitor.removeprefix("val_") in self.columns
        )
        if is_misnamed or needs_validation:
            raise missing_column(owner, monitor, self.columns)


class Callback:
    """Override what you need. Each worker has an instance of its own.

    The hooks are called on every rank, at the same moments, with the same numbers. What they
    change (a learning rate, the gradient), they must change alike on every rank.
    """

    # What it adds to the rows of the history: names, or patterns such as "norm_*".
    columns: tuple[str, ...] = ()

    def check(self, facts: RunFacts) -> None:
        """At the driver, before any job: raise a ParameterError for what can't work."""

    def on_run_start(self, training: TrainingRun) -> None:
        """Before the first step; the parameters are the same on every rank."""

    def on_epoch_start(self, training: TrainingRun) -> None:
        """Before the epoch's first step: `training.epoch.number` counts from 0.

        In a run that resumes in the middle of an epoch, that epoch has already started.
        """

    def on_step_start(self, training: TrainingRun) -> None:
        """Before a step, once this rank has its rows, if any are left. Also called before the
        round without rows in which the ranks find that the epoch is over."""

    def on_gradient(self, training: TrainingRun) -> None:
        """Between agreement and optimizer: `training.task.params.grads` is the mean over all
        ranks' rows, before it is clipped. Not called in a step that moves nothing. Where workers
        take local steps between two synchronizations (LocalSGD and its like), it is called before
        each of them, with this rank's own gradient."""

    def on_step_end(self, training: TrainingRun) -> None:
        """After an optimizer step, before its checkpoint, if one is due: `training.step` has it."""

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        """After validation. `row` is the epoch's row of the history; it may be added to."""

    def on_run_end(self, training: TrainingRun) -> None:
        """After the last epoch, before the weights are taken."""

    def state(self) -> dict[str, Any]:
        """What must survive a restart: tensors, numbers, text. The same on every rank."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; called after `on_run_start`."""


def overriding(callbacks: Any, hook: str) -> list[Any]:
    """Those with a hook of their own: a call for each step is not free."""
    return [c for c in callbacks if getattr(type(c), hook) is not getattr(Callback, hook)]


def missing_column(owner: str, monitor: str, columns: Any) -> ParameterError:
    return ParameterError(
        f"{owner}(monitor)",
        monitor,
        f"a column of the history: {', '.join(sorted(columns))}",
        "Names that start with val_ need validation=.",
    )
