"""Train on threads: a strategy's whole loop in one process, without Spark, in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparkdml.comm.base import Communicator
from sparkdml.comm.threads import run_threads
from sparkdml.feed.batch import Batch
from sparkdml.feed.order import Ints
from sparkdml.observe.timeline.recorder import NO_SPANS
from sparkdml.strategies.base import Strategy
from sparkdml.training.callbacks import Callback
from sparkdml.training.task import Task, TaskPlan, build_module
from sparkdml.training.training import Schedule, Training

Rows = dict[str, Tensor]


class ThreadContext:
    """What a strategy needs of a worker's context, on rows that are in memory."""

    def __init__(self, comm: Communicator, rows: Rows, held_out: Rows | None = None) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.traffic = comm.traffic
        self.device = torch.device("cpu")
        self.data = self
        self.facts = None
        self.spans = NO_SPANS
        self.host = "here"
        self.seed = 0
        self.checkpoint = None
        self.events: list[dict[str, Any]] = []
        self._rows, self._held_out = rows, held_out or {}

    def feed(
        self, batch_size: int, epoch: int = 0, shuffle: bool = True, position: Ints | None = None
    ) -> Iterator[Batch]:
        """The rows in order: with `epoch`, `shuffle` and `position` a real feed would do more."""
        return _cut(self._rows, batch_size)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        return _cut(self._held_out, batch_size)

    def reached(self, step: int) -> None:
        """Nobody is watching."""

    def on_stop_request(self, handle: Any) -> None:
        """There is no driver who might ask."""

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def flush_events(self) -> None:
        """Nobody is waiting."""


def _cut(rows: Rows, batch_size: int) -> Iterator[Batch]:
    count = len(next(iter(rows.values()))) if rows else 0
    if count:
        yield from Batch(rows, count).split(batch_size)


def train_on_threads(
    strategy_of: Any,
    plan: TaskPlan,
    schedule: Schedule,
    parts: Sequence[Rows],
    held_out: Sequence[Rows] | None = None,
    callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
    seed: int = 0,
) -> list[Training]:
    """One thread for each part of the rows; every rank's `Training` after the run.

    `strategy_of()` makes a strategy for each rank, as unpickling does in a cluster, and so may
    `callbacks` be a function; a list of them is shared by the ranks.
    """
    building = threading.Lock()

    def run_rank(comm: Communicator) -> Training:
        with building:  # threads share torch's random state
            torch.manual_seed(seed)
            task = Task(plan, torch.device("cpu"))
        context: Any = ThreadContext(
            comm, parts[comm.rank], held_out[comm.rank] if held_out else None
        )
        strategy: Strategy = strategy_of()
        own = callbacks() if callable(callbacks) else callbacks
        training = Training(context, task, schedule, own, strategy)
        strategy.run("worker", training)
        return training

    return run_threads(len(parts), run_rank)


def train_alone(
    plan: TaskPlan, batches: Sequence[Rows], seed: int = 0, clip_norm: float | None = None
) -> nn.Module:
    """The reference: plain torch in one process, one step for each given batch."""
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
