"""Train on threads: a strategy's whole loop in one process, without Spark, in milliseconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparkdml.comm.base import Communicator, World
from sparkdml.comm.threads import run_threads
from sparkdml.feed.batch import Batch
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.leased import LeaseReader
from sparkdml.feed.order import Ints, nothing_read
from sparkdml.feed.shared_rows import Piece
from sparkdml.observe.timeline.recorder import NO_SPANS
from sparkdml.runtime.protocol.roles import Role, job_roles, num_tasks, role_and_rank
from sparkdml.runtime.protocol.service import DriverService, TaskIdentity
from sparkdml.strategies.base import Strategy
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints, RankCheckpoints, Saved
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule
from sparkdml.training.task import Task, TaskPlan, build_module
from sparkdml.training.training import Training

Rows = dict[str, Tensor]


class ThreadContext:
    """The part of a worker's context that a strategy needs, on rows that are in memory."""

    def __init__(
        self,
        comm: Communicator,
        rows: Rows,
        held_out: Rows | None = None,
        checkpoint: RankCheckpoints | None = None,
        gang: Communicator | None = None,
    ) -> None:
        self.comm = comm
        self.gang = gang or comm
        self.rank, self.size, self.number = comm.rank, comm.size, self.gang.rank
        self.world = World(self.gang.rank, self.gang.size, ("here",) * self.gang.size)
        self.is_training_role = self.number == self.rank
        self.traffic = comm.traffic
        self.device = torch.device("cpu")
        self.data = self
        self.facts = None
        self.spans = NO_SPANS
        self.host = "here"
        self.seed = 0
        self.checkpoint = checkpoint
        self.events: list[dict[str, Any]] = []
        self._rows, self._held_out = rows, held_out or {}
        self.driver_service: DriverService | None = None
        self._leases: LeaseReader | None = None

    def feed(self, batch_size: int, epoch: int = 0, shuffle: bool = True) -> Iterator[Batch]:
        return self.read(BatchRequest(batch_size, epoch, shuffle))

    def read(self, request: BatchRequest) -> Iterator[Batch]:
        """Yield the rows in order; a real feed would use `epoch` and `shuffle`, too."""
        return _cut(self._rows, request.batch_size, request.rows_before)

    def position_after(self, num_rows: int, request: BatchRequest) -> Ints:
        """Return the counts as if all rows were in one shard, with this rank's number."""
        position = nothing_read()
        position[self.rank] = request.rows_before + num_rows
        return position

    def num_rows_in(self, epoch: int, batch_size: int) -> int:
        return len(next(iter(self._rows.values())))

    def pool(self, epoch: int = 0, shuffle: bool = True, position: Ints | None = None) -> Any:
        """Return all ranks' rows, in the order of `feed`."""
        start = 0 if position is None else int(position.sum())
        columns = [self.comm.allgather(values[start:]) for values in self._rows.values()]
        return MemoryPool(
            [dict(zip(self._rows, part, strict=True)) for part in zip(*columns, strict=True)]
        )

    @property
    def leases(self) -> LeaseReader:
        if self._leases is None:
            columns = [self.comm.allgather(values) for values in self._rows.values()]
            parts = [
                dict(zip(self._rows, part, strict=True)) for part in zip(*columns, strict=True)
            ]
            self._leases = LeaseReader(self.ask, MemoryPool(parts, self.rank), self.rank)
        return self._leases

    def ask(self, what: str, timeout_seconds: float = 30.0, **fields: Any) -> Any:
        """Ask the driver service that all ranks share, through JSON as over a connection."""
        assert self.driver_service is not None
        peer = TaskIdentity("worker", self.rank, 0, self.host)
        return json.loads(
            json.dumps(self.driver_service.answer(peer, what, json.loads(json.dumps(fields))))
        )

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        return _cut(self._held_out, batch_size)

    def reached(self, step: int) -> None:
        """Do nothing: there are no observers."""

    def on_stop_request(self, handle: Any) -> None:
        """Do nothing: there is no driver."""

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def flush_events(self) -> None:
        """Do nothing: no driver is waiting."""


class MemoryPool:
    """A `feed.pool.Pool` and a source of leased pieces, for rows that are in memory."""

    drops_last = False

    def __init__(self, parts: Sequence[Rows], rank: int = 0) -> None:
        self._parts, self._rank = parts, rank
        self._starts: dict[int, int] = {}
        self.counts = [len(next(iter(part.values()))) for part in parts]

    def begin(self, request: BatchRequest) -> tuple[int, dict[str, Any]]:
        start = request.rows_before
        self._starts = {self._rank: start}
        return self.counts[self._rank] - start, {"start": start}

    def meet(self, owner: int, card: dict[str, Any]) -> None:
        self._starts[owner] = card["start"]

    def batches(self, pieces: Iterator[Sequence[Piece]], rows_before: int = 0) -> Iterator[Batch]:
        for item in pieces:
            moved = [
                (o, self._starts.get(o, 0) + a, self._starts.get(o, 0) + b) for o, a, b in item
            ]
            columns = {
                name: torch.cat([self._parts[o][name][start:stop] for o, start, stop in moved])
                for name in self._parts[0]
            }
            yield Batch(columns, sum(stop - start for _, start, stop in item))


def _cut(rows: Rows, batch_size: int, start: int = 0) -> Iterator[Batch]:
    left = {name: values[start:] for name, values in rows.items()}
    count = len(next(iter(left.values()))) if left else 0
    if count:
        yield from Batch(left, count).split(batch_size)


def train_on_threads(
    strategy_of: Callable[[], Strategy],
    plan: TaskPlan,
    schedule: Schedule,
    parts: Sequence[Rows],
    held_out: Sequence[Rows] | None = None,
    callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    seed: int = 0,
    checkpoints: MemoryCheckpoints | None = None,
) -> list[Training]:
    """Train with a thread for each part of the rows; return every rank's `Training`.

    `strategy_of()` makes a strategy for each rank, as unpickling does in a cluster. `callbacks` can
    be such a function, too; the ranks share a list. With `checkpoints` the run resumes from the
    newest of them, if there is one. Tasks of other roles in the strategy's gang also have a thread
    each.
    """
    run = RankAssignment(
        strategy_of,
        plan,
        schedule=schedule,
        parts=parts,
        held_out=held_out,
        callbacks=callbacks,
        seed=seed,
        checkpoints=checkpoints,
        resumed=None if checkpoints is None else checkpoints.newest,
        driver_service=strategy_of().driver_service(len(parts)),
    )
    return run_threads(run.count, run.train)[: len(parts)]


@dataclass(frozen=True)
class RankAssignment:
    """A run on rows in memory: everything that each rank of the strategy's gang needs."""

    strategy_of: Callable[[], Strategy]
    plan: TaskPlan
    schedule: Schedule
    parts: Sequence[Rows]
    held_out: Sequence[Rows] | None = None
    callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]] = ()
    seed: int = 0
    checkpoints: MemoryCheckpoints | None = None
    resumed: Saved | None = None
    driver_service: DriverService | None = None

    @property
    def roles(self) -> tuple[Role, ...]:
        return job_roles(self.strategy_of().roles(len(self.parts)))[0]

    @property
    def count(self) -> int:
        return num_tasks(self.roles)

    def train(self, gang: Communicator) -> Training:
        roles = self.roles
        role, rank = role_and_rank(roles, gang.rank)
        comm = gang.split(roles.index(role)) if len(roles) > 1 else gang
        strategy, plan, schedule = self.strategy_of(), self.plan, self.schedule
        if role.reads == "none":
            context = ThreadContext(comm, {}, gang=gang)
            return train_rank(
                context,
                strategy,
                plan=plan,
                schedule=schedule,
                callbacks=(),
                seed=self.seed,
                role=role.name,
            )
        own = None
        if self.checkpoints is not None:
            own = RankCheckpoints(
                self.checkpoints, self.resumed, rank=rank, size=comm.size, schedule=schedule
            )
        held = self.held_out[rank] if self.held_out else None
        context = ThreadContext(comm, self.parts[rank], held_out=held, checkpoint=own, gang=gang)
        context.driver_service = self.driver_service
        return train_rank(
            context,
            strategy,
            plan=plan,
            schedule=schedule,
            callbacks=self.callbacks,
            seed=self.seed,
        )


_building = threading.Lock()  # threads share torch's random state


def train_rank(
    context: Any,
    strategy: Strategy,
    plan: TaskPlan,
    schedule: Schedule,
    callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    seed: int = 0,
    role: str = "worker",
) -> Training:
    """Do one rank's whole run, on a thread or in its own process."""
    with _building:
        torch.manual_seed(seed)
        task = Task(plan, torch.device("cpu"))
    own = callbacks() if callable(callbacks) else callbacks
    context.strategy = strategy  # for tests that look into it
    training = Training(context, task, schedule=schedule, callbacks=own)
    strategy.run(role, training)
    return training


def train_alone(
    plan: TaskPlan, batches: Sequence[Rows], seed: int = 0, clip_norm: float | None = None
) -> nn.Module:
    """Train the reference: plain torch in one process, one step for each given batch."""
    torch.manual_seed(seed)
    module, make_optimizer, loss_of = build_module(plan.model), plan.optimizer, plan.loss
    assert not isinstance(make_optimizer, Mapping), "one optimizer"
    assert loss_of is not None, "no step of one's own"
    optimizer = make_optimizer(module.parameters())
    for batch in batches:
        optimizer.zero_grad()
        outputs = module(*(batch[name] for name in plan.features))
        loss = loss_of(outputs, batch[plan.label] if plan.label else None)
        loss.mean().backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
    return module
