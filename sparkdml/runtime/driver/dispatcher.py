"""What the tasks of a submission say and ask, passed on to whom it concerns at the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sparkdml.errors import DataError
from sparkdml.feed.sharding import DataFacts
from sparkdml.network.connection import Message
from sparkdml.runtime.driver.control_server import Member
from sparkdml.runtime.driver.request import SubmissionContext
from sparkdml.runtime.protocol.roles import num_tasks, role_and_rank
from sparkdml.runtime.protocol.service import TaskIdentity
from sparkdml.runtime.worker.context import NO_ROWS


class Dispatcher:
    """Called from the endpoint's threads, one for each task."""

    def __init__(
        self, context: SubmissionContext, read_facts: Callable[[], DataFacts | None]
    ) -> None:
        self._ranks = [
            role_and_rank(job, index) for job in context.jobs for index in range(num_tasks(job))
        ]
        self._num_workers = context.leader.count
        self._on_event, self._read_facts = context.request.on_event, read_facts
        self._run, self._spools = context.request.run, context.spools
        self._service = context.driver_service
        self._peers: dict[int, TaskIdentity] = {}  # by number, the last attempt of each
        self._num_rows: dict[int, int] = {}

    def change(self, member: Member) -> None:
        """A task has come, or gone."""
        role, rank = self._ranks[member.rank]
        peer = TaskIdentity(role.name, rank, member.attempt, member.host)
        if member.state == "here":
            self._peers[member.rank] = peer
        if self._service is None:
            return
        if member.state == "here":
            self._service.on_join(peer)
        else:
            self._service.on_leave(peer, member.state)

    def event(self, number: int, message: Message) -> None:
        if message.get("kind") != "spooled":
            self._on_event(number, message)
        elif self._spools is not None:
            self._spools.note(number, message, self._num_workers)

    def answer(self, number: int, message: Message) -> Any:
        what = message.get("what")
        if what == "clock":
            return time.time()  # for the timeline, whose ranks all go by the driver's clock
        if what == "facts":
            return self._facts()
        if what == "rows":
            return self._check_rows(number, int(message["num_rows"]))
        if what == "desk":
            if self._service is None:
                return None
            peer, about = self._peers[number], str(message["about"])
            return self._service.answer(peer, about, message["fields"])
        if what == "spool-lost" and self._spools is not None:
            return self._spools.lost(number)
        return None if self._run is None else self._run.answer(number, message)

    def _check_rows(self, number: int, num_rows: int) -> None:
        """Where Spark can't tell how many rows there are, the workers do."""
        self._num_rows[number] = num_rows
        if len(self._num_rows) == self._num_workers and not any(self._num_rows.values()):
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
