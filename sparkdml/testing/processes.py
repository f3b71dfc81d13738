"""Train on processes: a strategy's whole loop over a real backend, without Spark.

Like `train_on_threads`, so that the contract suite of strategies also runs over torch.distributed
and Horovod. The strategy's driver service stays in this process, and answers over a socket.
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
from sparkdml.errors import CommunicationError, ProtocolError
from sparkdml.network.connection import Connection, Message
from sparkdml.network.timeouts import Timeouts
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.driver.dispatcher import identity
from sparkdml.runtime.protocol.messages import (
    FROM_DRIVER,
    Answer,
    Hello,
    Question,
    ServiceQuestion,
    ask,
    decode,
    encode,
)
from sparkdml.runtime.protocol.service import DriverService, TaskIdentity
from sparkdml.runtime.worker.control_client import is_effect
from sparkdml.strategies.base import Strategy
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints, Saved
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.threads import RankAssignment, Rows
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule
from sparkdml.training.task import TaskPlan

MAX_GANGS = 2


@dataclass(frozen=True)
class Trained:
    """The parts of a rank's `Training` that its process returns."""

    module: nn.Module
    history: list[dict[str, float]]
    step: int
    stopped: str | None

    @property
    def task(self) -> SimpleNamespace:
        return SimpleNamespace(module=self.module)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, and what it had saved."""

    trained: Trained | None
    error: Exception | None
    is_effect: bool  # whether the error follows from another rank's
    saved: list[Saved]


class ProcessTrainer:
    """Called like `train_on_threads`; its processes stay for later calls on as many ranks.

    They don't stay indefinitely: Horovod's threads poll for work all the time, and a few idle gangs
    leave no core to the one that trains.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._gangs: list[RankProcesses] = []  # the most recently used one is last

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
        assignment = RankAssignment(
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
            outcomes = self._run(assignment, every, place)
        for saved in (saved for outcome in outcomes for saved in outcome.saved):
            assert checkpoints is not None
            checkpoints.take_in(saved)
        # The cause comes first, then the errors that follow from it.
        for outcome in sorted(outcomes, key=lambda outcome: outcome.is_effect):
            if outcome.error is not None:
                raise outcome.error
        return [outcome.trained for outcome in outcomes if outcome.trained][: len(parts)]

    def _run(
        self, assignment: RankAssignment, every: int | None, place: ServiceAddress
    ) -> list[Outcome]:
        processes = self._gang(assignment.count)
        # Bytes: torch would send tensors as handles of memory that belongs to this process.
        told = processes.run(train_task, pickle.dumps(assignment), every, place)
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
    """Runs in every rank; returns a pickled `Outcome`."""
    assignment: RankAssignment = pickle.loads(assignment_pickled)
    checkpoints = None if every is None else MemoryCheckpoints(every)
    assignment = replace(assignment, checkpoints=checkpoints, driver_service=RemoteService(place))
    trained, error = None, None
    try:
        training = assignment.train(gang)
        trained = Trained(training.task.module, training.history, training.step, training.stopped)
    except Exception as raised:
        gang.abort()  # no rank waits for this one
        error = raised
    saved = [] if checkpoints is None else checkpoints.all()
    return pickle.dumps(Outcome(trained, error, error is not None and is_effect(error), saved))


# -- the driver service ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ServiceAddress:
    """The address at which it answers."""

    port: int
    token: str


@contextmanager
def served(driver_service: DriverService | None) -> Iterator[ServiceAddress]:
    """Serve through the driver's own control server, as in a cluster."""

    def answer(task: Hello, question: Question) -> Any:
        assert driver_service is not None, "the strategy has no driver service"
        assert isinstance(question, ServiceQuestion)
        return driver_service.answer(identity(task), question.about, question.fields)

    token = secrets.token_hex()
    server = ControlServer(
        "127.0.0.1",
        token,
        timeouts=Timeouts(60.0),
        on_event=lambda task, event: None,
        answer=answer,
    )
    try:
        yield ServiceAddress(server.port, token)
    finally:
        server.close()


class RemoteService:
    """The driver service as a rank's process sees it; it connects at the first question."""

    def __init__(self, place: ServiceAddress) -> None:
        self._place = place
        self._connection: Connection | None = None
        self._asking = threading.Lock()

    def answer(self, peer: TaskIdentity, about: str, fields: Message) -> Any:
        with self._asking:
            if self._connection is None:
                self._connection = self._connect(peer)
            self._connection.send(encode(ask(1, ServiceQuestion(about, fields))))
            line = self._connection.receive()
        if line is None:
            raise CommunicationError("the driver service is closed: the run has failed elsewhere")
        answer = decode(line, FROM_DRIVER)
        assert isinstance(answer, Answer)
        if answer.error is not None:
            raise ProtocolError(answer.error)
        return answer.answer

    def _connect(self, peer: TaskIdentity) -> Connection:
        connection = Connection.connect(
            ("127.0.0.1", self._place.port),
            token=self._place.token,
            wire="control",
            timeout_seconds=10,
        )
        hello = Hello(peer.role, peer.rank, number=peer.rank, host=peer.host, pid=os.getpid())
        connection.send(encode(hello))
        return connection

    def on_join(self, peer: TaskIdentity) -> None:
        """All ranks join at the start."""

    def on_leave(self, peer: TaskIdentity, outcome: str) -> None:
        """No rank is restarted."""
