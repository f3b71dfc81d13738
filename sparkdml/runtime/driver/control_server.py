"""The driver's control server: the tasks of a submission, their liveness, and their ends.

Runs in the driver's process. Each task's connection has a thread of the listener's, which receives
its beats, events, questions and report; the thread that watches the submission asks for the first
cause of a failure. Owns a `Member` for each task for as long as the submission lasts, and turns its
end into an exception.

Liveness is judged by beats and by the state of each connection, never by how fast a step is. The
end of a gang's worker is the end of the run. A task that Spark retries may fail and reconnect, as
the same member with a higher attempt: its failure is final only when Spark has given up on its job,
or when another attempt would fail in the same way. Where rows of a stage were lost with an
executor, Spark starts the whole stage again, with attempts that count from 0 and second copies of
tasks that still run: for tasks that wait for each other, that too is the end of the run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sparkdml import errors
from sparkdml.errors import ProtocolError, SparkDMLError, WorkerError, WorkerLost, task_name
from sparkdml.network.connection import MAX_LINE_BYTES, Connection, Message
from sparkdml.network.listener import Listener
from sparkdml.network.timeouts import Timeouts
from sparkdml.runtime.driver.failures import is_deterministic
from sparkdml.runtime.protocol.messages import (
    FROM_TASK,
    Answer,
    Ask,
    Done,
    Failed,
    FromDriver,
    FromTask,
    Hello,
    Question,
    RunIsOver,
    StopRequest,
    TaskEvent,
    decode,
    encode,
    read_question,
)

logger = logging.getLogger(__name__)


@dataclass
class Member:
    """One task as the driver knows it."""

    task: Hello
    last_beat: float
    state: str = "here"  # then "done", "failed" or "lost"
    changed: float = 0.0
    report: Failed | None = None

    @property
    def name(self) -> str:
        return f"{task_name(self.task.role, self.task.rank)} on {self.task.host}"


def lost(member: Member, what: str) -> WorkerLost:
    task = member.task
    return WorkerLost(task.rank, task.host, f"its process (pid {task.pid}) {what}", role=task.role)


def is_stage_retry(before: Hello, task: Hello) -> bool:
    """Whether Spark has started a whole stage once more, and not one task of it.

    Spark numbers all tasks of a session as it starts them, but attempts within a stage's start.
    """
    if before.task_id is None or task.task_id is None:
        return False
    return task.task_id > before.task_id and task.attempt <= before.attempt


def stage_retried(task: Hello) -> WorkerLost:
    return WorkerLost(
        task.rank,
        task.host,
        "an executor was lost with rows that had been shuffled for this stage, so Spark starts all "
        "of it again while some of its tasks still run. With checkpoint= a run resumes from its "
        "newest checkpoint by itself; a cluster with an external shuffle service keeps the rows",
        role=task.role,
    )


def is_deterministic_failure(member: Member) -> bool:
    kind = getattr(errors, "" if member.report is None else member.report.error, None)
    return isinstance(kind, type) and is_deterministic(kind)


def reported(member: Member) -> Exception:
    """A task's report as an exception: our own kinds as themselves, caused by the rest."""
    task, report = member.task, member.report
    assert report is not None, "it has failed"
    worker_error = WorkerError(task.rank, task.host, report.reason, report.traceback, task.role)
    worker_error.step = report.step
    kind = getattr(errors, report.error, None)
    if isinstance(kind, type) and issubclass(kind, SparkDMLError) and kind not in _EFFECT_KINDS:
        message = report.reason.partition(": ")[2]
        error = kind.__new__(kind)
        error.args = (f"{message} [{member.name}]",)
        error.__cause__ = worker_error
        return error
    return worker_error


_EFFECT_KINDS = (errors.CommunicationError, WorkerError, WorkerLost)


class ControlServer:
    """Listens on one address for the tasks of one submission."""

    def __init__(
        self,
        host: str,
        token: str,
        timeouts: Timeouts,
        on_event: Callable[[Hello, Message], None],
        answer: Callable[[Hello, Question], Any],
        retried: Collection[str] = (),
        on_change: Callable[[Member], None] = lambda member: None,
        together: Collection[str] = (),
    ) -> None:
        self._retried = set(retried)  # roles whose tasks Spark starts again
        self._together = set(together)  # those of them whose tasks wait for each other
        self._dismissed: set[str] = set()  # roles that are no longer needed
        self._on_change = on_change  # called as a member joins and as it leaves
        self._timeouts = timeouts
        self._on_event = on_event
        self._answer = answer
        self._lock = threading.Lock()
        self.members: dict[tuple[str, int], Member] = {}
        self._connections: dict[Connection, str] = {}  # and the role at the other end
        self.own_error: Exception | None = None
        self._listener = Listener(
            "control", host, token, self._serve, handshake_seconds=timeouts.connect
        )
        self.port: int = self._listener.port

    # -- what the driver asks -------------------------------------------------------------------

    def failure(self) -> Exception | None:
        """The first cause of a failure, once it is certain enough; None while all is well."""
        if self.own_error is not None:
            return self.own_error
        now = time.monotonic()
        with self._lock:
            everyone = sorted(self.members.values(), key=lambda member: member.changed)
        # Spark gives up on the task that has failed most often: among those of its job it counts.
        members = [member for member in everyone if member.task.role not in self._retried]
        members.sort(key=lambda member: -member.task.attempt)
        for member in everyone:
            is_final = member.task.role in self._retried and is_deterministic_failure(member)
            if member.state == "failed" and is_final:
                return reported(member)
        for member in members:
            is_cause = member.report is not None and not member.report.is_effect
            if member.state == "failed" and is_cause:
                return reported(member)
        # A process that raised reports before it closes: a bare end of the connection is a death.
        for member in members:
            if member.state == "lost":
                return lost(
                    member,
                    "exited without reporting an error: it was killed, perhaps for lack of memory, "
                    "or its executor was lost",
                )
        for member in members:
            silent = now - member.last_beat
            if member.state == "here" and silent > self._timeouts.heartbeat_timeout:
                return lost(
                    member,
                    f"has sent no heartbeat for {silent:.0f} s ({self._timeouts})",
                )
        for member in members:
            late = now - member.changed > self._timeouts.cause
            if member.state == "failed" and late:
                return reported(member)
        return None

    def give_up(self, roles: Collection[str]) -> None:
        """Spark will not start these again: their failures are now failures of the run."""
        self._retried -= set(roles)

    def take_silent(self) -> list[Member]:
        """Tasks that Spark could start again and that no longer beat; each is returned once."""
        now = time.monotonic()
        with self._lock:
            silent = [
                member
                for member in self.members.values()
                if member.task.role in self._retried
                and member.state == "here"
                and now - member.last_beat > self._timeouts.heartbeat_timeout
            ]
        return [member for member in silent if self._leave(member, "lost")]

    def dismiss(self, roles: Collection[str]) -> None:
        """Tell the members of these roles, also those that join later, that the run is over."""
        with self._lock:
            self._dismissed |= set(roles)
            connections = [
                connection for connection, role in self._connections.items() if role in roles
            ]
        for connection in connections:
            _send(connection, RunIsOver())

    def stop_all(self) -> None:
        """Tell all tasks that the run is over."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            _send(connection, RunIsOver())

    def request_stop(self, reason: str) -> bool:
        """Ask the workers to end after the step that they are in; False if there are none."""
        with self._lock:
            connections = list(self._connections)
        return sum(_send(connection, StopRequest(reason)) for connection in connections) > 0

    def all_gone(self) -> bool:
        """Whether every task that has joined has left."""
        with self._lock:
            return not self._connections

    def close(self) -> None:
        self._listener.close()

    # -- the threads ----------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        """One member, on the thread of its connection; its first message says which task it is."""
        hello = _receive(connection)
        if not isinstance(hello, Hello):
            return
        member = Member(hello, last_beat=time.monotonic())
        with self._lock:
            before = self.members.get((hello.role, hello.rank))
            is_late = before is not None and before.task.attempt > hello.attempt
            if (
                hello.role in self._together
                and before is not None
                and before.state != "done"
                and is_stage_retry(before.task, hello)
            ):
                self.own_error = self.own_error or stage_retried(hello)
                is_late = True
            if not is_late:
                self.members[hello.role, hello.rank] = member
                self._connections[connection] = hello.role
            is_dismissed = hello.role in self._dismissed
        if is_late:  # another attempt has its place already
            return
        if before is not None:
            self._leave(before, "lost")  # should the end of its connection not be here yet
        self._report_change(member)
        if is_dismissed:
            _send(connection, RunIsOver())
        try:
            while (line := connection.receive()) is not None:
                member.last_beat = time.monotonic()
                self._handle(member, line, connection)
        finally:
            self._leave(member, "lost")
            with self._lock:
                self._connections.pop(connection, None)

    def _leave(self, member: Member, state: str) -> bool:
        """Note that a member is gone, if it was here; whether it was."""
        with self._lock:
            if member.state != "here":
                return False
            member.state, member.changed = state, time.monotonic()
        self._report_change(member)
        return True

    def _report_change(self, member: Member) -> None:
        try:
            self._on_change(member)
        except Exception as error:
            self.own_error = self.own_error or error  # as with a mistake in an answer

    def _handle(self, member: Member, line: Message, connection: Connection) -> None:
        try:
            message = decode(line, FROM_TASK)
        except ProtocolError as error:
            _refuse(line, error, connection)
            return
        if isinstance(message, TaskEvent):
            event = {"type": "event", "kind": message.kind, **message.fields}
            self._on_event(member.task, event)
        elif isinstance(message, Ask):
            self._reply(member, message, connection)
        elif isinstance(message, Failed):
            member.report = message
            self._leave(member, "failed")
        elif isinstance(message, Done):
            self._leave(member, "done")

    def _reply(self, member: Member, asked: Ask, connection: Connection) -> None:
        try:
            answer = Answer(asked.number, self._answer(member.task, read_question(asked)))
            _send_answer(connection, asked, answer)
        except ProtocolError as error:  # the asker's own
            _send(connection, Answer(asked.number, error=str(error)))
        except Exception as error:
            # A mistake at the driver, on a thread where it would not be seen: it ends the run.
            self.own_error = self.own_error or error
            _send(connection, Answer(asked.number))


def _receive(connection: Connection) -> FromTask | None:
    line = connection.receive()
    if line is None:
        return None
    try:
        return decode(line, FROM_TASK)
    except ProtocolError as error:
        logger.warning("the control server refused a connection: %s", error)
        return None


def _refuse(line: Message, error: ProtocolError, connection: Connection) -> None:
    """Tell the asker, if what is malformed was a question; else there is none to tell."""
    number = line.get("number")
    if line.get("type") == "ask" and isinstance(number, int):
        _send(connection, Answer(number, error=str(error)))
    else:
        logger.warning("the control server ignored a message: %s", error)


def _send(connection: Connection, message: FromDriver) -> bool:
    """False if the task is gone, as the end of its connection tells."""
    with contextlib.suppress(OSError):
        connection.send(encode(message))
        return True
    return False


def _send_answer(connection: Connection, asked: Ask, answer: Answer) -> None:
    try:
        _send(connection, answer)
    except (TypeError, ValueError) as error:
        about = asked.fields.get("about", asked.what)
        raise ValueError(
            f"the driver's answer to {about!r} must be JSON that fits on a line of "
            f"{MAX_LINE_BYTES:,} bytes, but: {error}. Answer in pieces, or answer less"
        ) from error
