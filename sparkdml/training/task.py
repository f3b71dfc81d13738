"""The task: a module, its loss, its optimizer and its metrics, on this rank's rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import CheckpointError, ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.observe.timeline.recorder import NO_SPANS, NoSpans
from sparkdml.training.flat import FlatParams
from sparkdml.training.objective import LossFunction, Objective, metric_sum

ModelSource = nn.Module | Callable[[], nn.Module]
OptimizerSource = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Metric = Callable[[Any, Any], Any]

NUM_FIXED_STATS = 5  # weight, rows, loss, wishes, objections; the metrics follow


@dataclass(frozen=True)
class TaskPlan:
    """What the user wants to train, as it is shipped."""

    model: ModelSource
    loss: LossFunction
    optimizer: OptimizerSource
    features: tuple[str, ...]
    label: str | None
    metrics: Mapping[str, Metric]
    batch_size: int
    clip_norm: float | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over rows. They add up over steps and ranks; only a person wants their means."""

    weight: float = 0.0
    rows: float = 0.0
    loss: float = 0.0
    metrics: tuple[float, ...] = ()
    # How many ranks wish for a checkpoint, and how many object, being busy with the last one. They
    # travel with the sums, so that all ranks decide alike and no message is spent on it.
    wishes: float = 0.0
    objections: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        if not self.rows:
            return other  # the totals of nothing don't know how many metrics there are
        return Totals(
            self.weight + other.weight,
            self.rows + other.rows,
            self.loss + other.loss,
            tuple(a + b for a, b in zip(self.metrics, other.metrics, strict=True)),
        )

    @classmethod
    def of(cls, stats: Sequence[float]) -> Totals:
        weight, rows, loss, wishes, objections, *metrics = stats
        return cls(weight, rows, loss, tuple(metrics), wishes, objections)

    def means(self, names: Iterable[str]) -> dict[str, float]:
        weight, rows = max(self.weight, 1e-30), max(self.rows, 1e-30)
        values = {name: value / rows for name, value in zip(names, self.metrics, strict=True)}
        return {"loss": self.loss / weight, **values}


class Forward:
    """The module and its loss on this rank's rows, as sums."""

    def __init__(self, module: nn.Module, plan: TaskPlan, device: torch.device) -> None:
        self.module = module
        self.plan = plan
        self.device = device
        self.objective = Objective(plan.loss)
        self.objective.to(device)
        self.num_stats = NUM_FIXED_STATS + len(plan.metrics)
        self.output_shape: list[int] | None = None  # of one row, once the module has run
        self.last_loss: Tensor | None = None  # of this rank alone, to tell who has a NaN
        self._dtype = next(module.parameters()).dtype

    def __call__(self, batch: Batch, stats: Tensor) -> Tensor:
        """The summed loss of a batch; its totals are added to `stats`."""
        inputs = [self._input(batch[name]) for name in self.plan.features]
        outputs = self.module(*inputs)
        if self.output_shape is None:
            self.output_shape = output_row_shape(outputs, batch.num_rows)
        targets = self._input(batch[self.plan.label]) if self.plan.label else None
        loss, weight = self.objective(outputs, targets, batch.num_rows)
        self.last_loss = loss.detach()
        with torch.no_grad():
            metrics = [
                metric_sum(metric(outputs, targets), batch.num_rows, name)
                for name, metric in self.plan.metrics.items()
            ]
        add_stats(stats, [weight, batch.num_rows, self.last_loss, 0.0, 0.0, *metrics])
        return loss

    def evaluate(self, batches: Iterable[Batch]) -> Tensor:
        """The stats of all rows, without training on them."""
        stats = torch.zeros(self.num_stats, dtype=torch.float64, device=self.device)
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            for batch in batches:
                for piece in batch.split(self.plan.batch_size):
                    self(piece, stats)
        self.module.train(was_training)
        return stats

    def _input(self, tensor: Tensor) -> Tensor:
        """Floating-point columns in the module's own type; all else as it is."""
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class Task:
    """Computes gradients as sums into the flat buffer, and applies what was agreed on."""

    def __init__(self, plan: TaskPlan, device: torch.device) -> None:
        self.plan = plan
        self.module = build_module(plan.model).to(device)
        self.module.train()
        self.forward = Forward(self.module, plan, device)
        self.params = FlatParams(self.module, self.forward.num_stats)
        self.optimizer = build_optimizer(plan.optimizer, self.module)
        self.vote = (0.0, 0.0)  # a wish and an objection, for the next step's totals
        self.spans: NoSpans = NO_SPANS
        self._remaining = 0
        self._checked = False

    def grad(self, batch: Batch) -> None:
        """Sum the gradients and stats of a batch into `params`; an empty batch leaves zeros.

        A batch larger than `batch_size` is taken in pieces whose gradients add up.
        """
        self.params.zero()
        if any(self.vote):
            self.params.stats[3:5] = self.params.stats.new_tensor(self.vote)
        self._remaining = batch.num_rows
        if not batch.num_rows:
            return
        for piece in batch.split(self.plan.batch_size):
            self._remaining -= piece.num_rows
            loss = self.forward(piece, self.params.stats)
            self.spans.lap("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            self.spans.lap("backward")
        if not self._checked:
            self._checked = True
            self.params.check_views()

    def on_gradient(self, ready: Callable[[int], None]) -> None:
        """Call `ready(index)` when a parameter's gradient of the whole batch is complete."""
        self.params.on_gradient(lambda index: None if self._remaining else ready(index))

    def apply(self, totals: Totals) -> None:
        """One optimizer step with the agreed sum of gradients, made into a mean."""
        if not totals.weight:
            return  # every row of the batch was ignored by the loss
        if not self.forward.objective.is_sum:
            self.params.grads.div_(totals.weight)
        if self.plan.clip_norm is not None:
            norm = self.params.grads.norm()
            self.params.grads.mul_((self.plan.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()

    def state(self) -> State:
        """Parameters and optimizer; the buffers are the training's, which knows their weights."""
        module = self.module
        return {
            "parameters": Entry(dict(module.named_parameters(remove_duplicate=False))),
            "optimizer": Entry(self.optimizer.state_dict()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        own = dict(self.module.named_parameters(remove_duplicate=False))
        try:
            with torch.no_grad():
                for name, value in state["parameters"].items():
                    own[name].copy_(value)
            check_same_optimizer(self.optimizer, state["optimizer"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer ({error}), which can't be gone "
                "on from even by force. Use a new path"
            ) from error


def check_same_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Another optimizer's state may load, and fail in its first step."""
    before, now = state["param_groups"][0], optimizer.state_dict()["param_groups"][0]
    if before.keys() != now.keys():
        names = ", ".join(sorted(map(str, before.keys() ^ now.keys())))
        raise ValueError(f"the optimizers differ in {names}")


def add_stats(stats: Tensor, values: list[Tensor | float]) -> None:
    if stats.device.type == "cpu":
        view = stats.numpy()  # a tenth of the cost of torch's own indexing, in every step
        for index, value in enumerate(values):
            view[index] += float(value)
    else:
        stats += torch.stack([torch.as_tensor(value, device=stats.device) for value in values])


def build_module(model: ModelSource) -> nn.Module:
    """The module itself, or what the function makes."""
    module = model if isinstance(model, nn.Module) else model()
    if not isinstance(module, nn.Module):
        raise ParameterError(
            "model",
            type(module).__name__,
            "an nn.Module, or a function of no arguments that makes one",
        )
    return module


def build_optimizer(optimizer: OptimizerSource, module: nn.Module) -> torch.optim.Optimizer:
    built = optimizer(parameter for parameter in module.parameters() if parameter.requires_grad)
    if not isinstance(built, torch.optim.Optimizer):
        raise ParameterError(
            "optimizer",
            type(built).__name__,
            "a function that takes the parameters and makes a torch optimizer",
            "For instance functools.partial(torch.optim.SGD, lr=0.1).",
        )
    return built


def output_row_shape(outputs: Any, num_rows: int) -> list[int]:
    if not isinstance(outputs, Tensor) or outputs.dim() == 0 or outputs.shape[0] != num_rows:
        got = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
        raise ParameterError(
            "model",
            f"a module whose output is of {got}",
            f"one that returns a tensor with a first dimension of {num_rows}, the rows",
        )
    return list(outputs.shape[1:])
