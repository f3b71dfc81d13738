"""The plan of a training: what the user wants, as frozen values that are shipped to the workers.

`TaskPlan` says what: model, loss, optimizer, metrics. `Schedule` says how long, and on how many
rows at once. Both are made at the driver, and hold no open handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from sparkdml.training.metric_objects import is_metric_object
from sparkdml.training.objective import LossFunction

if TYPE_CHECKING:
    from sparkdml.feed.batch import Batch


class StepContext:
    """The worker's context, and where the run is. `fitted.evaluate` has no worker: see below.

    `step` counts the optimizer steps that were made before this one, `epoch` the epochs; both
    begin with 0. `training` is False where the rows are only looked at: in validation, and in
    `fitted.evaluate`, where there is no run to talk to. A step must not call collectives: ranks
    that have no rows left don't call it.
    """

    def __init__(
        self,
        device: torch.device,
        worker: Any = None,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.device = device
        self.training = False
        self._worker = worker
        self._progress = progress

    @property
    def step(self) -> int:
        return self._progress()[0]

    @property
    def epoch(self) -> int:
        return self._progress()[1]

    @property
    def rank(self) -> int:
        return 0 if self._worker is None else int(self._worker.rank)

    @property
    def size(self) -> int:
        return 1 if self._worker is None else int(self._worker.size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._worker is None:
            raise AttributeError(f"ctx.{name} is there in a training run only: ask ctx.training")
        return getattr(self._worker, name)


@dataclass(frozen=True)
class Schedule:
    """As it is shipped to the workers."""

    epochs: int
    batch_size: int
    accumulate: int = 1  # batches whose gradients are added up before a step
    shuffle: bool = True
    validates: bool = False
    stop_at_step: int | None = None  # a replay ends there, in the middle of an epoch if need be


OneModel = nn.Module | Callable[[], nn.Module]
ModelSource = OneModel | Mapping[str, OneModel]
OneOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
OptimizerSource = OneOptimizer | Mapping[str, OneOptimizer]
ParameterGroups = Callable[[nn.Module], list[dict[str, Any]]]
Metric = Callable[[Any, Any], Any]
StepFunction = Callable[[Any, "Batch", "StepContext"], Any]
Precision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True)
class TaskPlan:
    """Exactly one of `loss` and `step` is given."""

    model: ModelSource
    loss: LossFunction | None
    optimizer: OptimizerSource
    features: tuple[str, ...]
    label: str | None
    metrics: Mapping[str, Metric] | Sequence[str]  # with `step`: names of what it returns
    batch_size: int
    clip_norm: float | None = None
    step: StepFunction | None = None
    weight: str | None = None
    parameter_groups: ParameterGroups | None = None
    precision: Precision = "float32"
    compile: bool | Mapping[str, Any] = False
    sync_batch_norm: bool = False
    warm_start: Mapping[str, torch.Tensor] | None = None  # of the whole module, to begin from

    @cached_property
    def metric_functions(self) -> dict[str, Metric]:
        """Those whose sums travel with the gradients."""
        if not isinstance(self.metrics, Mapping):
            return {}
        return {n: metric for n, metric in self.metrics.items() if not is_metric_object(metric)}

    @cached_property
    def metric_objects(self) -> dict[str, Any]:
        """torchmetrics objects, which have states of their own."""
        if not isinstance(self.metrics, Mapping):
            return {}
        return {n: metric for n, metric in self.metrics.items() if is_metric_object(metric)}

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """Of the sums that travel with the gradients, in their order."""
        return tuple(self.metric_functions if isinstance(self.metrics, Mapping) else self.metrics)

    @cached_property
    def loss_names(self) -> tuple[str, ...]:
        """Of the optimizers, where there is one for each module."""
        return tuple(self.optimizer) if isinstance(self.optimizer, Mapping) else ()
