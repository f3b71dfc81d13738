"""The job that an estimator ships: the callable that every worker runs, and what it returns.

The callable is pickled at the driver and called once in each task, on its main thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdml.checkpoint.encoding import Stream, take_apart
from sparkdml.checkpoint.state import State
from sparkdml.runtime.worker.context import Context
from sparkdml.strategies.base import Strategy
from sparkdml.training.contribution import Contribution
from sparkdml.training.forward import OutputShape
from sparkdml.training.task import Task
from sparkdml.training.training import Training, TrainingPlan
from sparkdml.training.weights import encode_weights


@dataclass(frozen=True)
class TrainingResult:
    """What rank 0 returns."""

    weights: bytes  # safetensors
    history: list[dict[str, float]]
    stopped: str | None
    first_step_time: float


@dataclass(frozen=True)
class Fitted:
    """The result of a fit."""

    result: TrainingResult
    output_shape: OutputShape | None  # unknown if a step= function calls the module


@dataclass(frozen=True)
class TrainingJob:
    """A module-level callable, so that nothing but its fields is shipped."""

    plan: TrainingPlan
    strategy: Strategy

    def __call__(
        self, ctx: Context
    ) -> tuple[OutputShape | None, TrainingResult | None] | Contribution:
        """Return one row's output shape, if this rank has seen a row, and on rank 0 the result.

        If workers train independently, every rank returns its contribution.
        """
        training = self.train(ctx)
        if training.contribution is not None:
            return training.contribution
        task = training.task
        if ctx.number:
            return task.forward.output_shape, None
        return task.forward.output_shape, TrainingResult(
            weights=encode_weights(task.module),
            history=training.history,
            stopped=training.stopped,
            first_step_time=training.first_step_time,
        )

    def train(self, ctx: Context) -> Training:
        plan = self.plan
        task = Task(plan.task, ctx.device)
        training = Training(ctx, task, schedule=plan.schedule, callbacks=plan.callbacks)
        self.strategy.run(ctx.plan.role.name, training)
        return training


@dataclass(frozen=True)
class ReplayJob:
    """Trains up to a step, and returns the state instead of a model."""

    job: TrainingJob

    def __call__(self, ctx: Context) -> tuple[bytes, bytes, list[float]] | None:
        training = self.job.train(ctx)
        if ctx.number:
            return None
        state = training.replayed
        assert state is not None, "a replay must end with the state of its last step"
        shared = {name: entry for name, entry in state.items() if entry.rule == "replicated"}
        own = {name: entry for name, entry in state.items() if entry.rule != "replicated"}
        return _encode(shared), _encode(own), training.losses


def _encode(state: State) -> bytes:
    return b"".join(Stream(*take_apart(state)))
