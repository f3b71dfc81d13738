"""Train on threads through a strategy's servers: real connections, and a service in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from sparkdml.comm.base import Communicator, World
from sparkdml.comm.single import SingleCommunicator
from sparkdml.comm.threads import run_threads
from sparkdml.errors import CommunicationError
from sparkdml.runtime.protocol.roles import Role
from sparkdml.runtime.protocol.service import DriverService, SharedService, TaskIdentity
from sparkdml.strategies.base import Strategy
from sparkdml.testing.faults import Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints, RankCheckpoints
from sparkdml.testing.threads import Rows, ThreadContext, train_rank
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule
from sparkdml.training.task import TaskPlan
from sparkdml.training.training import Training


class ServedContext(ThreadContext):
    """A task outside a gang, which asks a driver service."""

    def __init__(
        self,
        run: ServedRun,
        peer: TaskIdentity,
        size: int,
        rows: Rows,
        held_out: Rows | None = None,
        checkpoint: RankCheckpoints | None = None,
    ) -> None:
        super().__init__(SingleCommunicator(), rows, held_out, checkpoint)
        self.rank, self.size, self.attempt, self.host = peer.rank, size, peer.attempt, peer.host
        self.plan = SimpleNamespace(secret=run.secret, must_encrypt=False)
        self._run, self._peer = run, peer
        self.events = run.events.setdefault(peer.role, [])

    def use_communicator(self, comm: Communicator) -> None:
        self.comm = self.gang = comm

    def ask(self, what: str, timeout_seconds: float = 30.0, **fields: Any) -> Any:
        # In a cluster the driver would end this task. Servers must still learn which tasks are
        # lost.
        if what == "collective" and self._run.failed.is_set():
            raise CommunicationError("the run has failed elsewhere")
        return self._run.driver_service.answer(self._peer, what, fields)

    def wait_for_the_end(self, timeout_seconds: float) -> bool:
        return self._run.over.wait(timeout_seconds)

    def ingest(self) -> None:
        """All data is in memory."""


class ServedRun:
    """What all tasks of one run share."""

    def __init__(self, driver_service: DriverService) -> None:
        self.driver_service = driver_service
        self.secret = (
            driver_service.secret
            if isinstance(driver_service, SharedService)
            else b"of one run on threads"
        )
        self.events: dict[str, list[dict[str, Any]]] = {}  # by role, of all its tasks
        self.over, self.failed = threading.Event(), threading.Event()

    def do(
        self, role: str, rank: int, work: Callable[[TaskIdentity], Any], max_attempts: int = 1
    ) -> Any:
        """Run like a task: the driver service learns of its start and end; it may be restarted."""
        for attempt in range(max_attempts):
            peer = TaskIdentity(role, rank, attempt, "127.0.0.1")
            self.driver_service.on_join(peer)
            try:
                done = work(peer)
            except BaseException as error:
                is_last = attempt + 1 == max_attempts or not isinstance(error, Injected)
                if is_last:
                    self.failed.set()
                self.driver_service.on_leave(peer, "failed")
                if is_last:
                    raise
            else:
                self.driver_service.on_leave(peer, "done")
                return done
        raise AssertionError("at least one attempt")


def train_served(
    strategy_of: Callable[[], Strategy],
    plan: TaskPlan,
    schedule: Schedule,
    parts: Sequence[Rows],
    held_out: Sequence[Rows] | None = None,
    callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    seed: int = 0,
    checkpoints: MemoryCheckpoints | None = None,
    max_attempts: int = 1,
    on_start: Callable[[ServedRun], None] = lambda run: None,
) -> list[Training]:
    """Like `train_on_threads`, for strategies with servers, with or without a gang.

    A worker that fails with `Injected` is restarted, up to `max_attempts`, as in Spark. `on_start`
    receives the state that all tasks of the run share.
    """
    size = len(parts)
    roles = strategy_of().roles(size)
    driver_service = strategy_of().driver_service(size)
    assert driver_service is not None, "a strategy with servers has a driver service"
    run = ServedRun(driver_service)
    on_start(run)
    resumed = None if checkpoints is None else checkpoints.newest

    def work(peer: TaskIdentity, comm: Communicator | None = None) -> Training:
        rank, own = peer.rank, None
        if checkpoints is not None:
            own = RankCheckpoints(checkpoints, resumed, rank=rank, size=size, schedule=schedule)
        held = held_out[rank] if held_out else None
        context = ServedContext(
            run, peer, size=size, rows=parts[rank], held_out=held, checkpoint=own
        )
        if comm is not None:
            context.comm = context.gang = comm
            context.world = World(rank, size, ("here",) * size)
        return train_rank(
            context, strategy_of(), plan=plan, schedule=schedule, callbacks=callbacks, seed=seed
        )

    def join_gang(comm: Communicator) -> Training:
        done: Training = run.do("worker", comm.rank, partial(work, comm=comm))
        return done

    def help_out(role: Role, peer: TaskIdentity) -> None:
        held = join(held_out or ()) if role.reads == "validation" else None
        context = ServedContext(run, peer, size=role.count, rows={}, held_out=held)
        train_rank(
            context,
            strategy_of(),
            plan=plan,
            schedule=schedule,
            callbacks=(),
            seed=seed,
            role=peer.role,
        )

    others = [(role, rank) for role in roles[1:] for rank in range(role.count)]
    with ThreadPoolExecutor(size + len(others)) as pool:
        helpers = [
            pool.submit(run.do, role.name, rank, partial(help_out, role), max_attempts)
            for role, rank in others
        ]
        workers: list[Future[Any]] = []
        if roles[0].gang:
            workers.append(pool.submit(run_threads, size, join_gang))
        else:
            workers += [
                pool.submit(run.do, "worker", rank, work, max_attempts) for rank in range(size)
            ]
        errors = [error for worker in workers if (error := worker.exception()) is not None]
        run.over.set()
        for helper in helpers:
            helper.exception()
    if isinstance(driver_service, SharedService):
        driver_service.close()
    # The others' errors follow from the first cause.
    errors.sort(key=lambda error: isinstance(error, CommunicationError))
    for error in errors:
        raise error
    for helper in helpers:
        helper.result()
    results = [worker.result() for worker in workers]
    return results[0] if roles[0].gang else results


def join(parts: Sequence[Rows]) -> Rows:
    """Return all rows as one part."""
    names = list(parts[0]) if parts else []
    return {name: torch.cat([part[name] for part in parts]) for name in names}
