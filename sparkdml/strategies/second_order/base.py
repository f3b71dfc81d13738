"""The base of second-order methods on the full data: iterations, their end, their line search."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.leases import LeaseService
from sparkdml.runtime.protocol.plan import Role
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.second_order.full_objective import Evaluation, FullObjective
from sparkdml.strategies.second_order.line_search import Sample, search
from sparkdml.training.callbacks import LearningRateSchedule
from sparkdml.training.callbacks.base import overriding
from sparkdml.training.totals import Totals

if TYPE_CHECKING:
    from sparkdml.training.epoch import Epoch
    from sparkdml.training.training import Training, TrainingPlan


MAX_STALLED = 4  # steps in a row that make nothing better


class SecondOrder(Strategy):
    """One iteration an epoch, each a direction and a line search over whole passes."""

    has_own_optimizer = True
    columns = ("passes", "step_length", "gradient_norm")

    def __init__(
        self, tolerance: float, l2: float, max_trials: int, backups: bool, backend: str
    ) -> None:
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise ParameterError("tolerance", tolerance, "a number of at least 0")
        if not (math.isfinite(l2) and l2 >= 0):
            raise ParameterError("l2", l2, "a number of at least 0")
        if max_trials < 1:
            raise ParameterError("max_trials", max_trials, "at least 1")
        self.tolerance, self.l2, self.max_trials = tolerance, l2, max_trials
        self.backups = backups
        self._num_passes = 0  # of this run's attempt: the name by which a pass's rows are leased
        self.backend = check_backend(backend)
        self._here: Evaluation | None = None  # at the present parameters, where it is known
        self._best = (math.inf, math.inf, 0)  # the lowest, the flattest, and steps since either

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers, reads="leases" if self.backups else "shards")]

    def driver_service(self, num_workers: int) -> LeaseService | None:
        return LeaseService(num_workers, backs_up=True) if self.backups else None

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        """In every pass the same rows in the same order, and where they move, of all ranks."""
        if not self.backups:
            return training.ctx.read(BatchRequest(training.rows_per_step, 0, shuffle=False))
        self._num_passes += 1
        # One size for all ranks, also where the global batch doesn't divide by their number: else
        # where batches begin and end would depend on who computes them.
        rows = training.rows_of(0)
        request = BatchRequest(rows, self._num_passes, shuffle=False, like_epoch=0)
        return training.ctx.leases.batches(request)

    def check(self, plan: TrainingPlan) -> None:
        name = type(self).__name__
        unused = {
            "clipNorm": (plan.task.clip_norm, None),
            "parameterGroups": (plan.task.parameter_groups, None),
            "gradientAccumulation": (plan.schedule.accumulate, 1),
        }
        for parameter, (value, default) in unused.items():
            if value != default:
                raise ParameterError(parameter, value, f"left out with {name}")
        if plan.task.precision == "fp16":
            raise ParameterError(
                "precision", "fp16", f"'float32' with {name}: its sums are of all rows, unscaled"
            )
        if self.backups and plan.task.metric_objects:
            raise ParameterError(
                "metrics",
                ", ".join(plan.task.metric_objects),
                f"functions with {name}(backups=True): rows that two ranks compute count once, and "
                "a metric object can't forget them",
            )
        for callback in plan.callbacks:
            if isinstance(callback, LearningRateSchedule):
                reason = "whose steps have no learning rate"
            elif overriding([callback], "on_gradient"):
                reason = "whose ranks hold slices of the gradient, so that on_gradient has none"
            else:
                continue
            kind = type(callback).__name__
            raise ParameterError(
                "callbacks", kind, f"without it where strategy= is {name}, {reason}"
            )

    def run(self, role: str, training: Training) -> None:
        self.objective = FullObjective(training, self.l2)
        for epoch in training.epochs(self):
            if epoch.steps or training.is_replayed:
                continue  # a resumed run has already made this epoch's step
            epoch.begin_step()
            here = self._here
            if here is None:
                here = self.objective.evaluate(epoch)
                epoch.check_finite(here.totals, self.objective.own_loss)
                if math.isinf(here.value):
                    raise DataError(
                        "the gradient is not finite where training begins, though the loss is: "
                        "look for a root of zero, or a division by zero, in the model"
                    )
            reached = self._reach(training, epoch, here)
            epoch.measured["gradient_norm"] = reached.steepness
            epoch.count(reached.totals)
            training.spans.lap("communication")
            epoch.tick()

    def _reach(self, training: Training, epoch: Epoch, here: Evaluation) -> Evaluation:
        """The next point, and where it is the last one, why."""
        epoch.measured["step_length"] = 0.0
        if here.steepness <= self.tolerance:
            # Perhaps known from an earlier step, in which a rank requested it.
            found: Evaluation | None = replace(here, totals=here.totals.without_votes())
        else:
            found = self.iterate(epoch, here)
        reached = self.objective.evaluate(epoch) if found is None else found
        height = f"the gradient's largest element is {reached.steepness:.2g}"
        if reached.steepness <= self.tolerance:
            training.stop(f"{height}, tolerance={self.tolerance:g}")
        elif found is None or self._stalls(reached):
            kind = str(training.task.params.values.dtype).removeprefix("torch.")
            training.stop(f"no step lowers the loss any further in {kind}'s precision: {height}")
        self._here = reached
        return reached

    def _stalls(self, reached: Evaluation) -> bool:
        """Whether the last steps found nothing lower and nothing flatter: they walk in rounding."""
        lowest, flattest, stalled = self._best
        is_better = reached.value < lowest or reached.steepness < flattest
        stalled = 0 if is_better else stalled + 1
        self._best = (min(lowest, reached.value), min(flattest, reached.steepness), stalled)
        return stalled >= MAX_STALLED

    @abstractmethod
    def iterate(self, epoch: Epoch, here: Evaluation) -> Evaluation | None:
        """Move the parameters; None if there is no way down, and they are where they were."""

    def search_along(
        self, epoch: Epoch, here: Evaluation, direction: Tensor, slope: float, first_step: float
    ) -> Evaluation | None:
        """Move along a direction to a point that will do; None if there is none, and stay."""
        if not slope < 0:
            return None
        objective, start = self.objective, self.objective.point
        noise = objective.precision * abs(here.value)
        trials = search(Sample(0.0, here.value, slope), first_step, self.max_trials, noise)
        step, found, is_over = next(trials), None, False
        while not is_over:
            objective.move(start + step * direction)
            reached = objective.evaluate(epoch, direction)
            tried = step
            try:
                step = trials.send(Sample(step, reached.value, reached.slope))
            except StopIteration as end:
                found, is_over = end.value, True
        if found is None:
            objective.move(start)
            return None
        epoch.measured["step_length"] = found.step
        if found.step != tried:
            objective.move(start + found.step * direction)
            reached = objective.evaluate(epoch, direction)
        return reached

    def state(self) -> State:
        here = self._here
        if here is None:
            return {}
        known = {
            "value": here.value,
            "steepness": here.steepness,
            "slope": here.slope,
            "totals": asdict(here.totals),
            "best": list(self._best),
        }
        # The gradient is a slice, another one on each rank. On another number of ranks it is
        # lost, and one pass over the data brings it back.
        return {"here": Entry(known), "gradient": Entry(here.gradient, "reset")}

    def load(self, state: Mapping[str, Any]) -> None:
        self._here = None
        if "gradient" in state:
            known = state["here"]
            self._best = tuple(known["best"])
            self._here = Evaluation(
                value=known["value"],
                gradient=state["gradient"],
                steepness=known["steepness"],
                slope=known["slope"],
                totals=Totals.load(known["totals"]),
            )
