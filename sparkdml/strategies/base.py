"""The strategy's interface, and the loop that synchronous strategies inherit.

A strategy owns the loop, the roles and the shape of the Spark jobs. It is made at the driver, where
`check`, `roles` and `driver_service` are called, and is pickled to each worker, where `run` is
called on the task's main thread, once for each submission. It imports no pyspark: everything that
it needs comes through the `Training` that it is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from sparkdml.checkpoint.state import State
from sparkdml.comm.backends import BACKENDS
from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.feed.batch import Batch
from sparkdml.runtime.protocol.roles import Role
from sparkdml.runtime.protocol.service import DriverService
from sparkdml.runtime.worker.context import Context
from sparkdml.runtime.worker.tracing import open_wire
from sparkdml.training.epoch import Epoch
from sparkdml.training.task import Task, Totals
from sparkdml.training.training import Training, TrainingPlan


class Strategy(ABC):
    """How the workers of a run come to one model.

    It is pickled and shipped to the workers, so make it a plain object of its settings. Its repr
    must tell all of them: a run resumes only with a strategy of the same repr.

    Attributes:
        backend: of the communicator that the workers open.
        is_synchronous: whether all ranks compute each step's gradient at the same time.
        communicates: whether workers speak to each other before they end.
        has_own_optimizer: whether it takes steps of its own, so that optimizer= is left out.
        columns: those that it adds to the history, by `epoch.measured`.
    """

    backend: str = "auto"
    is_synchronous = False
    communicates = True
    has_own_optimizer = False
    columns: tuple[str, ...] = ()

    @abstractmethod
    def roles(self, num_workers: int) -> list[Role]:
        """What to launch: first the role that trains. Called at the driver; pure.

        Roles of the gang share a barrier job and `ctx.gang`; each other role is a job of ordinary
        tasks. Jobs that don't train start before the one that does, and are told when it is done.
        """

    def check(self, plan: TrainingPlan) -> None:
        """At the driver, before any job: a ParameterError for what it can't do, or would ignore."""
        return  # most take all that the estimator does

    @abstractmethod
    def run(self, role: str, training: Training) -> None:
        """The loop, in a worker of the given role."""

    def driver_service(self, num_workers: int) -> DriverService | None:
        """The strategy's service in the driver, created per submission; `ctx.ask` asks it."""
        return None

    def batches(self, training: Training, epoch: Epoch) -> Iterator[Batch]:
        """The rows of an epoch that this rank computes: its own, unless they move."""
        return training.ctx.read(training.request(epoch))

    @property
    def wire_topology(self) -> str:
        """By which topology `open_wire` exchanges sums; on a GPU it is always "native"."""
        return "auto"

    def open_wire(self, ctx: Context, comm: Communicator | None = None) -> Communicator:
        """What sums gradients and models among the ranks of `comm`: by default, of all workers.

        Every rank calls it, and closes what it returns; the worker's `comm` stays as it is.
        """
        return open_wire(ctx.comm if comm is None else comm, ctx, self.wire_topology)

    def state(self) -> State:
        """What a checkpoint must hold of the strategy itself, on this rank."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state; called once all ranks have the same weights, before the first step."""
        assert not state, f"{type(self).__name__} has a state() but no load()"


def check_backend(backend: str) -> str:
    """The backend, if it is one that a strategy's user may name."""
    allowed = [name for name in BACKENDS if name != "single"]
    if backend not in allowed:
        raise ParameterError("backend", backend, f"one of {', '.join(map(repr, allowed))}")
    return backend


class StepStrategy(Strategy):
    """Synchronous steps: every rank computes a gradient, all agree on one, all apply it."""

    is_synchronous = True

    def roles(self, num_workers: int) -> list[Role]:
        return [Role("worker", num_workers)]

    def run(self, role: str, training: Training) -> None:
        task, clock, spans = training.task, training.clock, training.spans
        self.start(training)
        for epoch in training.epochs(self):
            for batch in epoch:
                task.grad(batch)
                clock.lap("compute")
                totals = self.agree(task)
                clock.lap("communication")
                spans.lap("communication")
                if not epoch.count(totals):
                    break  # no rank had a row left
                task.apply(totals)
                spans.lap("optimizer")
                epoch.tick()

    @abstractmethod
    def start(self, training: Training) -> None:
        """Make all ranks alike before the first step."""

    @abstractmethod
    def agree(self, task: Task) -> Totals:
        """Turn this rank's sums of gradients and stats into those over all ranks, in place."""
