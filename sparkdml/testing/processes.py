"""Train on processes: a strategy's whole loop over a real backend, without Spark.

As `train_on_threads`, so that the contract suite of strategies runs over torch.distributed and
Horovod, too. What a strategy keeps at the driver, its desk, stays here and is asked over a socket.
"""

from __future__ import annotations

import os
import pickle
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from sparkdml.comm.base import Communicator
from sparkdml.errors import CommunicationError
from sparkdml.network.connection import Connection, Message
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.protocol.service import DriverService, TaskIdentity
from sparkdml.runtime.worker.control_client import is_effect
from sparkdml.strategies.base import Strategy
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints, Saved
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.threads import RankAssignment, Rows
from sparkdml.training.callbacks import Callback
from sparkdml.training.task import TaskPlan
from sparkdml.training.training import Schedule

MAX_GANGS = 2


@dataclass(frozen=True)
class Trained:
    """What is left of a rank's `Training` once its process is done with it."""

    module: nn.Module
    history: list[dict[str, float]]
    step: int
    stopped: str | None

    @property
    def task(self) -> SimpleNamespace:
        return SimpleNamespace(module=self.module)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, and what it had saved by then."""

    trained: Trained | None
    error: Exception | None
    is_effect: bool  # whether the error follows from another rank's
    saved: list[Saved]


class ProcessTrainer:
    """Called as `train_on_threads` is. Its processes stay for the next call of as many ranks.

    Not for ever: Horovod's threads look for work all the time, and a few idle gangs of them leave
    no core to the one that trains.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._gangs: list[RankProcesses] = []  # the one that was used last comes last

    def __call__(
        self,
        strategy_of: Callable[[], Strategy],
        plan: TaskPlan,
        schedule: Schedule,
        parts: Sequence[Rows],
        held_out: Sequence[Rows] | None = None,
        callbacks: Sequence[Callback] | Callable[[], Sequence[Callback]] = (),
        seed: int = 0,
        checkpoints: MemoryCheckpoints | None = None,
    ) -> list[Trained]:
        resumed = None if checkpoints is None else checkpoints.newest
        seats = RankAssignment(
            strategy_of,
            plan,
            schedule=schedule,
            parts=parts,
            held_out=held_out,
            callbacks=callbacks,
            seed=seed,
            resumed=resumed,
        )
        every = None if checkpoints is None else checkpoints.every
        with served(strategy_of().driver_service(len(parts))) as place:
            outcomes = self._run(seats, every, place)
        for saved in (saved for outcome in outcomes for saved in outcome.saved):
            assert checkpoints is not None
            checkpoints.take_in(saved)
        # What went wrong comes first, then what the others noticed of it.
        for outcome in sorted(outcomes, key=lambda outcome: outcome.is_effect):
            if outcome.error is not None:
                raise outcome.error
        return [outcome.trained for outcome in outcomes if outcome.trained][: len(parts)]

    def _run(
        self, seats: RankAssignment, every: int | None, place: ServiceAddress
    ) -> list[Outcome]:
        processes = self._gang(seats.count)
        # Bytes: torch would send tensors by handles on memory that belongs to this process.
        told = processes.run(train_task, pickle.dumps(seats), every, place)
        outcomes: list[Outcome] = [pickle.loads(one) for one in told]
        if any(outcome.error for outcome in outcomes):  # their communicators are aborted
            processes.stop()
        return outcomes

    def _gang(self, size: int) -> RankProcesses:
        same = [gang for gang in self._gangs if gang.size == size]
        gang = same[0] if same else RankProcesses(self._backend, size, patience_seconds=30.0)
        self._gangs = [*(other for other in self._gangs if other is not gang), gang]
        while len(self._gangs) > MAX_GANGS:
            self._gangs.pop(0).stop()
        return gang

    def close(self) -> None:
        while self._gangs:
            self._gangs.pop().stop()


def train_task(
    gang: Communicator, assignment_pickled: bytes, every: int | None, place: ServiceAddress
) -> bytes:
    """In every rank: an `Outcome`, pickled."""
    seats: RankAssignment = pickle.loads(assignment_pickled)
    checkpoints = None if every is None else MemoryCheckpoints(every)
    seats = replace(seats, checkpoints=checkpoints, driver_service=RemoteService(place))
    trained, error = None, None
    try:
        training = seats.train(gang)
        trained = Trained(training.task.module, training.history, training.step, training.stopped)
    except Exception as raised:
        gang.abort()  # nobody waits for this rank
        error = raised
    saved = [] if checkpoints is None else checkpoints.all()
    return pickle.dumps(Outcome(trained, error, error is not None and is_effect(error), saved))


# -- the desk -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServiceAddress:
    """Where it can be asked."""

    port: int
    token: str


@contextmanager
def served(driver_service: DriverService | None) -> Iterator[ServiceAddress]:
    """By the driver's own endpoint, as in a cluster."""

    def answer(rank: int, message: Message) -> Any:
        assert driver_service is not None, "the strategy has no desk"
        return driver_service.answer(
            TaskIdentity("worker", rank, 0, "here"), message["about"], message["fields"]
        )

    token = secrets.token_hex()
    endpoint = ControlServer(
        "127.0.0.1",
        token,
        beat_timeout_seconds=60.0,
        on_event=lambda rank, event: None,
        answer=answer,
    )
    try:
        yield ServiceAddress(endpoint.port, token)
    finally:
        endpoint.close()


class RemoteService:
    """The desk as a rank's process sees it; it connects when it is first asked."""

    def __init__(self, place: ServiceAddress) -> None:
        self._place = place
        self._wire: Connection | None = None
        self._asking = threading.Lock()

    def answer(self, peer: TaskIdentity, about: str, fields: Message) -> Any:
        with self._asking:
            if self._wire is None:
                self._wire = self._connect(peer)
            self._wire.send(
                {"type": "ask", "what": "desk", "number": 1, "about": about, "fields": fields}
            )
            answer = self._wire.receive()
        if answer is None:
            raise CommunicationError("the desk is closed: the run has failed elsewhere")
        return answer["answer"]

    def _connect(self, peer: TaskIdentity) -> Connection:
        connection = Connection.connect(
            ("127.0.0.1", self._place.port),
            token=self._place.token,
            wire="control",
            timeout_seconds=10,
        )
        connection.send(
            {"rank": peer.rank, "host": peer.host, "pid": os.getpid(), "role": peer.role}
        )
        return connection

    def on_join(self, peer: TaskIdentity) -> None:
        """Nobody comes late here."""

    def on_leave(self, peer: TaskIdentity, outcome: str) -> None:
        """Nor comes back."""
