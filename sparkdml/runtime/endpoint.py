"""The driver's end of the control wire: who is there, who beats, what failed, and first of all why.

Liveness is judged by beats and by the state of each connection, never by how fast a step is.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkdml import errors
from sparkdml.errors import SparkDMLError, WorkerError, WorkerLost
from sparkdml.runtime.wire import Message, Wire

# A lost peer shows as errors on the others, sometimes sooner than the loss itself is seen.
GRACE_FOR_THE_CAUSE_SECONDS = 2.0
HELLO_SECONDS = 10.0


@dataclass
class Member:
    """One worker as the driver knows it."""

    role: str
    rank: int
    host: str
    pid: int
    last_beat: float
    state: str = "here"  # then "done", "failed" or "lost"
    changed: float = 0.0
    report: Message = field(default_factory=dict)


class Endpoint:
    """Listens on one address for the workers of one run."""

    def __init__(
        self,
        host: str,
        token: str,
        beat_timeout_seconds: float,
        on_event: Callable[[int, Message], None],
        answer: Callable[[int, Message], Any],
    ) -> None:
        self._token = token
        self._beat_timeout_seconds = beat_timeout_seconds
        self._on_event = on_event
        self._answer = answer
        self._lock = threading.Lock()
        self.members: dict[tuple[str, int], Member] = {}
        self._wires: set[Wire] = set()
        self.own_error: Exception | None = None
        self._listener = socket.create_server((host, 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="sparkdml-endpoint", daemon=True)
        self._thread.start()

    # -- what the driver asks -------------------------------------------------------------------

    def failure(self) -> Exception | None:
        """The first cause of a failure, once it is certain enough; None while all is well."""
        if self.own_error is not None:
            return self.own_error
        now = time.monotonic()
        with self._lock:
            members = sorted(self.members.values(), key=lambda member: member.changed)
        for member in members:
            if member.state == "failed" and not member.report.get("is_effect"):
                return _reported(member)
        # A process that raised reports before it closes: a bare end of the connection is a death.
        for member in members:
            if member.state == "lost":
                return WorkerLost(
                    member.rank,
                    member.host,
                    f"its process (pid {member.pid}) ended without a word: killed, perhaps for "
                    "lack of memory, or its executor was lost",
                )
        for member in members:
            silent = now - member.last_beat
            if member.state == "here" and silent > self._beat_timeout_seconds:
                return WorkerLost(
                    member.rank,
                    member.host,
                    f"its process (pid {member.pid}) has not answered for {silent:.0f} s "
                    f"(heartbeatTimeout={self._beat_timeout_seconds:g})",
                )
        for member in members:
            late = now - member.changed > GRACE_FOR_THE_CAUSE_SECONDS
            if member.state == "failed" and late:
                return _reported(member)
        return None

    def stop_all(self) -> None:
        """Tell the workers that the run is over, for those that listen."""
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            with contextlib.suppress(OSError):  # gone already
                wire.send({"stop": True})

    def request_stop(self, reason: str) -> bool:
        """Ask the workers to end after the step that they are in; False if there are none."""
        with self._lock:
            wires = list(self._wires)
        asked = False
        for wire in wires:
            with contextlib.suppress(OSError):  # gone already
                wire.send({"please": "stop", "reason": reason})
                asked = True
        return asked

    def all_gone(self) -> bool:
        """Whether every worker that ever came has left."""
        with self._lock:
            return not self._wires

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # or `accept` would sit there for ever
        self._listener.close()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()
        self._thread.join(timeout=5)

    # -- the threads ----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(connection,), name="sparkdml-member", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_SECONDS)  # a stranger may not hold a thread for ever
        wire = Wire(connection)
        hello = wire.receive()
        if hello is None or not hmac.compare_digest(str(hello.get("token", "")), self._token):
            wire.close()
            return
        connection.settimeout(None)
        member = Member(
            str(hello["role"]),
            int(hello["rank"]),
            str(hello["host"]),
            int(hello["pid"]),
            time.monotonic(),
        )
        with self._lock:
            self.members[member.role, member.rank] = member
            self._wires.add(wire)
        while (message := wire.receive()) is not None:
            self._handle(member, message, wire)
        with self._lock:
            if member.state == "here":
                member.state, member.changed = "lost", time.monotonic()
            self._wires.discard(wire)
        wire.close()

    def _handle(self, member: Member, message: Message, wire: Wire) -> None:
        member.last_beat = time.monotonic()
        kind = message.get("type")
        if kind == "event":
            self._on_event(member.rank, message)
        elif kind == "ask":
            try:
                answer = self._answer(member.rank, message)
            except Exception as error:
                # A mistake at the driver, on a thread that nobody would hear: it ends the run.
                answer, self.own_error = None, self.own_error or error
            wire.send({"answer": answer, "number": message.get("number")})
        elif kind in ("failed", "done"):
            with self._lock:
                member.report = message
                member.state, member.changed = kind, time.monotonic()


def _reported(member: Member) -> Exception:
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
