"""The driver's end of the control wire: who is there, who beats, what failed, and first of all why.

Liveness is judged by beats and by the state of each connection, never by how fast a step is. The
end of a gang's worker is the end of the run. A task that Spark retries may fail and come back, as
the same member with a higher attempt: it is final only when Spark has given up on its job, or when
the failure is of a kind that would come again. Where rows of a stage were lost with an executor,
Spark begins the stage anew, with attempts that count from 0 and second copies of tasks that still
run: for tasks that wait for each other that is the end of the run, too.

A task as the driver knows it, and its end as an exception.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from sparkdml import errors
from sparkdml.errors import SparkDMLError, WorkerError, WorkerLost
from sparkdml.network.connection import MAX_LINE_BYTES, Connection, Message
from sparkdml.network.listener import Listener
from sparkdml.runtime.driver.failures import is_deterministic


@dataclass
class Member:
    """One worker as the driver knows it."""

    role: str
    rank: int
    host: str
    pid: int
    last_beat: float
    attempt: int = 0
    task_id: int | None = None  # Spark's own, of this attempt
    state: str = "here"  # then "done", "failed" or "lost"
    changed: float = 0.0
    report: Message = field(default_factory=dict)


def lost(member: Member, what: str) -> WorkerLost:
    who = "" if member.role == "worker" else f" of the {member.role}"
    return WorkerLost(member.rank, member.host, f"its process{who} (pid {member.pid}) {what}")


def is_stage_retry(before: Member, member: Member) -> bool:
    """Whether Spark has started a whole stage once more, and not one task of it.

    Spark numbers all tasks of a session as it starts them, but attempts within a stage's start.
    """
    if before.task_id is None or member.task_id is None or before.state == "done":
        return False
    return member.task_id > before.task_id and member.attempt <= before.attempt


def stage_retried(member: Member) -> WorkerLost:
    return WorkerLost(
        member.rank,
        member.host,
        "an executor was lost with rows that had been shuffled for this stage, so Spark begins all "
        "of it anew, while some of its tasks still run. With checkpoint= a run goes on from its "
        "newest checkpoint by itself; a cluster with an external shuffle service keeps the rows",
    )


def is_deterministic_failure(member: Member) -> bool:
    kind = getattr(errors, str(member.report.get("error")), None)
    return isinstance(kind, type) and is_deterministic(kind)


def reported(member: Member) -> Exception:
    """A worker's report as an exception: our own kinds as themselves, caused by the rest."""
    report = member.report
    reason = str(report.get("reason"))
    worker_error = WorkerError(member.rank, member.host, reason, str(report.get("traceback")))
    worker_error.step = report.get("step")
    kind = getattr(errors, str(report.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, SparkDMLError) and kind not in _EFFECT_KINDS:
        message = reason.partition(": ")[2]
        error = kind.__new__(kind)
        error.args = (f"{message} [rank {member.rank} on {member.host}]",)
        error.__cause__ = worker_error
        return error
    return worker_error


_EFFECT_KINDS = (errors.CommunicationError, WorkerError, WorkerLost)


# A lost peer shows as errors on the others, sometimes sooner than the loss itself is seen.
GRACE_FOR_THE_CAUSE_SECONDS = 2.0


class ControlServer:
    """Listens on one address for the workers of one run."""

    def __init__(
        self,
        host: str,
        token: str,
        beat_timeout_seconds: float,
        on_event: Callable[[int, Message], None],
        answer: Callable[[int, Message], Any],
        retried: Collection[str] = (),
        on_change: Callable[[Member], None] = lambda member: None,
        together: Collection[str] = (),
    ) -> None:
        self._retried = set(retried)  # roles whose tasks Spark starts again
        self._together = set(together)  # those of them whose tasks wait for each other
        self._dismissed: set[str] = set()  # roles that are no longer needed
        self._on_change = on_change  # called as a member comes, and as it goes
        self._beat_timeout_seconds = beat_timeout_seconds
        self._on_event = on_event
        self._answer = answer
        self._lock = threading.Lock()
        self.members: dict[tuple[str, int], Member] = {}
        self._connections: dict[Connection, str] = {}  # and the role at the other end
        self.own_error: Exception | None = None
        self._listener = Listener("control", host, token, self._serve)
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
        members = [member for member in everyone if member.role not in self._retried]
        members.sort(key=lambda member: -member.attempt)
        for member in everyone:
            is_final = member.role in self._retried and is_deterministic_failure(member)
            if member.state == "failed" and is_final:
                return reported(member)
        for member in members:
            if member.state == "failed" and not member.report.get("is_effect"):
                return reported(member)
        # A process that raised reports before it closes: a bare end of the connection is a death.
        for member in members:
            if member.state == "lost":
                return lost(
                    member,
                    "ended without a word: killed, perhaps for lack of memory, or its executor "
                    "was lost",
                )
        for member in members:
            silent = now - member.last_beat
            if member.state == "here" and silent > self._beat_timeout_seconds:
                return lost(
                    member,
                    f"has not answered for {silent:.0f} s "
                    f"(heartbeatTimeout={self._beat_timeout_seconds:g})",
                )
        for member in members:
            late = now - member.changed > GRACE_FOR_THE_CAUSE_SECONDS
            if member.state == "failed" and late:
                return reported(member)
        return None

    def give_up(self, roles: Collection[str]) -> None:
        """Spark will not start these again: what befell them is now a failure of the run."""
        self._retried -= set(roles)

    def take_silent(self) -> list[Member]:
        """Those that Spark could start again and that no longer answer; each is told once."""
        now = time.monotonic()
        with self._lock:
            silent = [
                member
                for member in self.members.values()
                if member.role in self._retried
                and member.state == "here"
                and now - member.last_beat > self._beat_timeout_seconds
            ]
        return [member for member in silent if self._leave(member, "lost")]

    def dismiss(self, roles: Collection[str]) -> None:
        """Tell the members of these roles, also those who still come, that the run is over."""
        with self._lock:
            self._dismissed |= set(roles)
            connections = [
                connection for connection, role in self._connections.items() if role in roles
            ]
        self._stop(connections)

    def stop_all(self) -> None:
        """Tell the workers that the run is over, for those that listen."""
        with self._lock:
            connections = list(self._connections)
        self._stop(connections)

    def _stop(self, connections: list[Connection]) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):  # gone already
                connection.send({"stop": True})

    def request_stop(self, reason: str) -> bool:
        """Ask the workers to end after the step that they are in; False if there are none."""
        with self._lock:
            connections = list(self._connections)
        asked = False
        for connection in connections:
            with contextlib.suppress(OSError):  # gone already
                connection.send({"please": "stop", "reason": reason})
                asked = True
        return asked

    def all_gone(self) -> bool:
        """Whether every worker that ever came has left."""
        with self._lock:
            return not self._connections

    def close(self) -> None:
        self._listener.close()

    # -- the threads ----------------------------------------------------------------------------

    def _serve(self, connection: Connection) -> None:
        """One member, on the thread of its connection; its first message says which task it is."""
        hello = connection.receive()
        if hello is None:
            return
        member = Member(
            str(hello["role"]),
            int(hello["rank"]),
            host=str(hello["host"]),
            pid=int(hello["pid"]),
            last_beat=time.monotonic(),
            attempt=int(hello.get("attempt", 0)),
            task_id=hello.get("task_id"),
        )
        with self._lock:
            before = self.members.get((member.role, member.rank))
            is_late = before is not None and before.attempt > member.attempt
            if (
                member.role in self._together
                and before is not None
                and is_stage_retry(before, member)
            ):
                self.own_error = self.own_error or stage_retried(member)
                is_late = True
            if not is_late:
                self.members[member.role, member.rank] = member
                self._connections[connection] = member.role
            is_dismissed = member.role in self._dismissed
        if is_late:  # another attempt has its place already
            return
        if before is not None:
            self._leave(before, "lost")  # should the end of its connection not be here yet
        self._report_change(member)
        if is_dismissed:
            self._stop([connection])
        try:
            while (message := connection.receive()) is not None:
                self._handle(member, message, connection)
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
            self.own_error = self.own_error or error  # as a mistake in an answer

    def _handle(self, member: Member, message: Message, connection: Connection) -> None:
        member.last_beat = time.monotonic()
        kind = message.get("type")
        if kind == "event":
            self._on_event(member.rank, message)
        elif kind == "ask":
            try:
                self._reply(connection, message, self._answer(member.rank, message))
            except Exception as error:
                # A mistake at the driver, on a thread that nobody would hear: it ends the run.
                self.own_error = self.own_error or error
                self._reply(connection, message, None)
        elif kind in ("failed", "done"):
            member.report = message
            self._leave(member, str(kind))

    def _reply(self, connection: Connection, question: Message, answer: Any) -> None:
        try:
            connection.send({"answer": answer, "number": question.get("number")})
        except OSError:
            return  # the worker is gone, as the end of its connection tells
        except (TypeError, ValueError) as error:
            about = question.get("about", question.get("what"))
            raise ValueError(
                f"the driver's answer to {about!r} must be JSON that fits on a line of "
                f"{MAX_LINE_BYTES:,} bytes, but: {error}. Answer in pieces, or answer less"
            ) from error
