"""A task as the driver knows it, and its end as an exception."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdml import errors
from sparkdml.errors import SparkDMLError, WorkerError, WorkerLost
from sparkdml.runtime.restarts import is_certain
from sparkdml.runtime.wire import Message


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


def is_anew(before: Member, member: Member) -> bool:
    """Whether Spark has started a whole stage once more, and not one task of it.

    Spark numbers all tasks of a session as it starts them, but attempts within a stage's start.
    """
    if before.task_id is None or member.task_id is None or before.state == "done":
        return False
    return member.task_id > before.task_id and member.attempt <= before.attempt


def stage_began_anew(member: Member) -> WorkerLost:
    return WorkerLost(
        member.rank,
        member.host,
        "an executor was lost with rows that had been shuffled for this stage, so Spark begins all "
        "of it anew, while some of its tasks still run. With checkpoint= a run goes on from its "
        "newest checkpoint by itself; a cluster with an external shuffle service keeps the rows",
    )


def comes_again(member: Member) -> bool:
    kind = getattr(errors, str(member.report.get("error")), None)
    return isinstance(kind, type) and is_certain(kind)


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
