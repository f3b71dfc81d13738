"""The task: modules, their losses, optimizers and metrics, on this rank's rows alone.

Each worker makes one from the shipped `TaskPlan` and owns it for the run. It communicates nothing:
it computes sums into flat buffers, which the strategy adds up over the ranks, and applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import CheckpointError
from sparkdml.feed.batch import Batch
from sparkdml.observe.timeline.recorder import NO_SPANS, NoSpans
from sparkdml.training.flat import FlatParams
from sparkdml.training.flat_step import flat_step
from sparkdml.training.forward import Forward as Forward
from sparkdml.training.forward import LossScale
from sparkdml.training.modules import build_module as build_module
from sparkdml.training.modules import compile_module
from sparkdml.training.optimizers import ONLY, Optimizers
from sparkdml.training.plan import Metric as Metric
from sparkdml.training.plan import ModelSource as ModelSource
from sparkdml.training.plan import OptimizerSource as OptimizerSource
from sparkdml.training.plan import TaskPlan as TaskPlan
from sparkdml.training.sync_batch_norm import BatchNormGroup
from sparkdml.training.totals import VOTES, Sums
from sparkdml.training.totals import Totals as Totals
from sparkdml.training.weights import load_state


class Task:
    """Computes gradients as sums into the flat buffer, and applies what was agreed on.

    Attributes:
        module: the model on this rank's device; its parameters are views into `params.values`.
        params: the `FlatParams`: values, gradients and stats, a flat tensor each.
        optimizers: torch's, by the name of their module; a single one has the name "".
        vote: this rank's wish for a checkpoint, objection to one, and wish to stop, for the next
            totals; `grad` puts it among the stats.
    """

    def __init__(self, plan: TaskPlan, device: torch.device) -> None:
        self.plan = plan
        self.module = load_state(build_module(plan.model), plan.warm_start).to(device)
        self.module.train()
        self.forward = Forward(self.module, plan, device)
        self.params = FlatParams(self.module, self.forward.num_stats)
        self._sums = Sums(self.params.stats)
        self.optimizers = Optimizers(plan.optimizer, self.module, plan.parameter_groups)
        self.loss_scale = LossScale(plan.batch_size) if plan.precision == "fp16" else None
        self.vote = (0.0, 0.0, 0.0)  # a wish, an objection, a stop, for the next step's totals
        self.on_agreed: list[Callable[[], None]] = []  # called between agreement and optimizer
        self.batch_norm_group: BatchNormGroup | None = None  # where it is over all ranks
        self.spans: NoSpans = NO_SPANS
        self._parameters = {name: self.optimizers.parameters(name) for name in self.optimizers}
        self._grads = {
            name: self.params.grads[self.params.span_of(p)] for name, p in self._parameters.items()
        }
        self._steps = {
            name: flat_step(one, self.params, self._parameters[name])
            for name, one in self.optimizers.items()
        }
        self._remaining = 0
        self._checked = False
        compile_module(self.module, plan.compile)

    def grad(self, batch: Batch) -> None:
        """Sum the gradients and stats of a batch into `params`; an empty batch leaves zeros."""
        self.params.zero()
        if any(self.vote):
            self.params.stats[VOTES] = self.params.stats.new_tensor(self.vote)
        self._remaining = batch.num_rows
        if batch.num_rows:
            for piece in self.pieces(batch):
                self._remaining -= piece.num_rows
                loss = self.forward(piece, self._sums)
                self.spans.lap("forward")
                if self.loss_scale is None and isinstance(loss, Tensor):
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    self._backward(loss)
                self.spans.lap("backward")
            if not self._checked:
                self._checked = True
                self.params.check_views()
        if self.batch_norm_group is not None:
            self.batch_norm_group.finish()

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """A batch larger than `batch_size` is computed in pieces, whose gradients add up.

        They are as even as can be: a piece of a single row would be of no use to BatchNorm.
        """
        return batch.split_evenly(-(-batch.num_rows // self.plan.batch_size))

    def _backward(self, loss: Tensor | dict[str, Tensor]) -> None:
        """Each loss into the parameters of its own optimizer; times the scale, if there is one."""
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        if isinstance(loss, Tensor):
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            return
        for index, (name, value) in enumerate(loss.items()):
            torch.autograd.backward(
                value * scale,
                inputs=self._parameters[name],
                retain_graph=index + 1 < len(loss),  # losses may share a part of the graph
            )

    def on_gradient(self, ready: Callable[[int], None]) -> None:
        """Call `ready(index)` when a parameter's gradient of the whole batch is complete."""
        self.params.on_gradient(lambda index: None if self._remaining else ready(index))

    def totals(self, stats: Tensor | None = None) -> Totals:
        """What `params.stats`, or another vector of that layout, holds: of this rank, or of all."""
        return self.forward.totals(self.params.stats if stats is None else stats)

    def apply(self, totals: Totals) -> None:
        """A step of each optimizer that has a loss, with the agreed sums made into means."""
        weights = {ONLY: totals.weight}
        if self.plan.loss_names:
            weights = dict(zip(self.plan.loss_names, totals.weights, strict=True))
        moving = [name for name, weight in weights.items() if weight]
        if not moving:
            return  # every row of the batch was ignored by the loss
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        if self.loss_scale is not None and not self.loss_scale.accepts(self.params.grads):
            return  # the gradients overflowed: a smaller scale next time
        objective = self.forward.objective
        is_sum = objective is not None and objective.is_sum
        for name in moving:
            divisor = scale * (1.0 if is_sum else weights[name])
            if divisor != 1.0:
                self._grads[name].div_(divisor)
        for listener in self.on_agreed:
            listener()
        for name in moving:
            if self.plan.clip_norm is not None:
                grads = self._grads[name]
                grads.mul_((self.plan.clip_norm / (grads.norm() + 1e-6)).clamp(max=1.0))
            self._steps[name]()

    def state(self) -> State:
        """Parameters and optimizers; the buffers are the training's, which knows their weights."""
        state = {
            "parameters": Entry(dict(self.module.named_parameters(remove_duplicate=False))),
            **self.optimizers.state(),
            **self.forward.metric_objects.state(),
        }
        if self.loss_scale is not None:
            state["loss_scale"] = Entry(self.loss_scale.state())
        return state

    def load(self, state: Mapping[str, Any], rank: int = 0) -> None:
        own = dict(self.module.named_parameters(remove_duplicate=False))
        try:
            with torch.no_grad():
                for name, value in state["parameters"].items():
                    own[name].copy_(value)
            self.optimizers.load(state)
            if self.loss_scale is not None:
                self.loss_scale.load(state["loss_scale"])
            self.forward.metric_objects.load(state, rank)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint is of another model or optimizer ({error}), so it can't be "
                "resumed, even with resume='force'. Use a new path"
            ) from error
