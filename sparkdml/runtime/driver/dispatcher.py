"""Dispatches the tasks' events and questions, to observers, checkpoints, spools and the service.

At the driver, on the control server's threads, one for each task, while a submission lasts. The
table of questions is `runtime.protocol.messages.QUESTIONS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sparkdml.errors import DataError, ProtocolError, task_name
from sparkdml.feed.sharding import DataFacts
from sparkdml.network.connection import Message
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun
from sparkdml.runtime.driver.control_server import Member
from sparkdml.runtime.driver.request import SubmissionContext
from sparkdml.runtime.protocol.messages import (
    CheckpointDamaged,
    ClockQuestion,
    FactsQuestion,
    Hello,
    PartsReport,
    Question,
    RowsReport,
    ServiceQuestion,
    SpoolLost,
)
from sparkdml.runtime.protocol.service import TaskIdentity
from sparkdml.runtime.worker.context import NO_ROWS


class Dispatcher:
    """Passes on what a task says, with the task that says it."""

    def __init__(
        self, context: SubmissionContext, read_facts: Callable[[], DataFacts | None]
    ) -> None:
        self._leader = context.leader
        self._on_event, self._read_facts = context.request.on_event, read_facts
        self._run, self._spools = context.request.run, context.spools
        self._service = context.driver_service
        self._num_rows: dict[int, int] = {}  # by worker

    def change(self, member: Member) -> None:
        """A task has joined, or left."""
        if self._spools is not None and member.state in ("lost", "failed"):
            self._spools.orphaned(member.task.rank, member.task.pid)
        if self._service is None:
            return
        if member.state == "here":
            self._service.on_join(identity(member.task))
        else:
            self._service.on_leave(identity(member.task), member.state)

    def event(self, task: Hello, event: Message) -> None:
        if event["kind"] == "spooled":
            if self._spools is not None:
                # Only a gang's is kept for the next attempt; others must be removed, too.
                is_kept = event["whole"] and task.role == self._leader.name and self._leader.gang
                self._spools.note(
                    task.rank, {**event, "whole": is_kept}, self._leader.count, task.pid
                )
            return
        if event["kind"] == "output" and task.role != self._leader.name:
            event = {**event, "task": task_name(task.role, task.rank)}
        self._on_event(task.number, event)

    def answer(self, task: Hello, question: Question) -> Any:
        match question:
            case ClockQuestion():
                return time.time()  # for the timeline, whose ranks all go by the driver's clock
            case FactsQuestion():
                return self._facts()
            case RowsReport(num_rows):
                return self._check_rows(task.rank, num_rows)
            case SpoolLost():
                return None if self._spools is None else self._spools.lost(task.rank)
            case PartsReport(report):
                return self._checkpointed_run().receive(task.rank, report)
            case CheckpointDamaged(id, why):
                return self._checkpointed_run().reject(id, why)
            case ServiceQuestion(about, fields):
                if self._service is None:
                    raise ProtocolError(
                        f"this run has no driver service to ask about {about!r}: pass dml.run an "
                        "object that has a method driver_service(num_workers) beside __call__(ctx)"
                    )
                return self._service.answer(identity(task), about, fields)

    def _checkpointed_run(self) -> CheckpointedRun:
        if self._run is None:
            raise ProtocolError("this run keeps no checkpoints, so there is nothing to report")
        return self._run

    def _check_rows(self, rank: int, num_rows: int) -> None:
        """Where Spark can't tell how many rows there are, the workers do."""
        self._num_rows[rank] = num_rows
        if len(self._num_rows) == self._leader.count and not any(self._num_rows.values()):
            raise DataError(NO_ROWS)

    def _facts(self) -> Message | None:
        facts = self._read_facts()
        if facts is None:
            return None if self._spools is None else self._spools.facts
        known: Message = {**asdict(facts), "problem": facts.problem(), "refusal": None}
        if self._run is not None:
            known["refusal"] = self._run.check_data(known)
        if self._spools is not None:
            self._spools.facts = known
        return known


def identity(task: Hello) -> TaskIdentity:
    return TaskIdentity(task.role, task.rank, task.attempt, task.host)
