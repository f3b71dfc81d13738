"""A task's control client: it sends heartbeats, events and its failure, and asks questions.

Runs in a task's process and owns its connection to the driver's control server. One thread sends
beats and events, so that a slow or dead driver never holds up a training step, and another one
receives; questions are sent by the threads that ask them. Events are dropped, oldest first, when
the driver does not keep up; failures never are.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from sparkdml.errors import CommunicationError, ProtocolError, SetupError, task_name
from sparkdml.network.connection import Connection, Message
from sparkdml.network.timeouts import CONTROL_CLOSE_SECONDS
from sparkdml.runtime.protocol.messages import (
    FROM_DRIVER,
    Answer,
    Beat,
    CheckpointDamaged,
    Done,
    Failed,
    FromTask,
    Hello,
    PartsReport,
    Question,
    RunIsOver,
    StopRequest,
    TaskEvent,
    ask,
    decode,
    encode,
)
from sparkdml.runtime.protocol.plan import Plan

logger = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 1000
MAX_TRACEBACK = 100_000


class ControlClient:
    """One task's connection to the driver, by which the driver also sees that it is alive."""

    def __init__(self, plan: Plan, task: Hello) -> None:
        try:
            self._connection = Connection.connect(
                (plan.driver_host, plan.driver_port),
                token=plan.token,
                wire="control",
                timeout_seconds=plan.timeouts.connect,
            )
        except OSError as error:
            raise SetupError(
                f"{task_name(task.role, task.rank)} on {task.host} can't reach the driver at "
                f"{plan.driver_host}:{plan.driver_port}: {error}. Open the driver's ports to the "
                "executors, or set spark.driver.host (on Spark Connect: "
                "spark.sparkdml.driver.host) to an address that they can reach"
            ) from error
        self._send(task)
        self._timeouts = plan.timeouts
        self._events: deque[TaskEvent] = deque(maxlen=MAX_WAITING_EVENTS)
        self._answers: dict[int, queue.Queue[Answer | None]] = {}
        self.step = 0  # of the training loop
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._closing = False
        self._has_failed = False
        self._stop_request: str | None = None
        self._on_stop_request: Callable[[str], None] | None = None
        self._num_questions = 0
        self._sending = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"sparkdml-control-{what}", daemon=True)
            for what, target in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def event(self, kind: str, **fields: Any) -> None:
        """Tell the driver something; sent with the next beat at the latest."""
        self._events.append(TaskEvent(kind, fields))

    def flush(self) -> None:
        self._wake.set()

    def ask(self, question: Question, timeout_seconds: float | None = None) -> Any:
        """A question to the driver, from any thread; None if there is no answer in time.

        Raises a ProtocolError if the driver knows no such question.
        """
        answers: queue.Queue[Answer | None] = queue.Queue()
        try:
            with self._sending:
                self._num_questions += 1
                number = self._num_questions
                self._answers[number] = answers
                self._send(ask(number, question))
            if self._stopped.is_set():
                return None  # there will be no more answers
            answer = answers.get(timeout=timeout_seconds or self._timeouts.driver_answer)
        except (OSError, queue.Empty):
            return None
        finally:
            self._answers.pop(number, None)
        if answer is not None and answer.error is not None:
            raise ProtocolError(answer.error)
        return None if answer is None else answer.answer

    def report_parts(self, report: Message) -> None:
        """For `ctx.checkpoint`: this rank's parts are in the store, or could not be written."""
        self.ask(PartsReport(report))

    def report_damaged(self, checkpoint_id: str, why: str) -> None:
        """For `ctx.checkpoint`: this checkpoint can't be read."""
        self.ask(CheckpointDamaged(checkpoint_id, why))

    def on_stop_request(self, handle: Callable[[str], None]) -> None:
        """Call `handle(reason)`, on another thread, when the driver asks for an early end."""
        self._on_stop_request = handle
        if self._stop_request is not None:
            handle(self._stop_request)  # it came before there was a handler

    def wait_for_the_end(self, timeout_seconds: float) -> bool:
        """Until the driver ends the run, or is gone; False if that has not come by then."""
        return self._stopped.wait(timeout_seconds)

    def failed(self, error: BaseException) -> None:
        """Report a failure with its traceback, before Spark learns of it. The first one counts."""
        if self._has_failed:
            return
        self._has_failed = True
        text = "".join(traceback.format_exception(error))
        report = Failed(
            error=type(error).__name__,
            reason="".join(traceback.format_exception_only(error)).strip()[-MAX_TRACEBACK:],
            traceback=text[-MAX_TRACEBACK:],
            is_effect=is_effect(error),
            step=self.step,
        )
        # The driver may be gone; then Spark's own report of the task is all that is left.
        with contextlib.suppress(OSError, ValueError), self._sending:
            self._send_events()  # first, as the driver may end the run once it has the report
            self._send(report)

    def done(self) -> None:
        """Everything went well: the end of this connection is no loss."""
        self._closing = True
        self._wake.set()
        self._threads[0].join(timeout=CONTROL_CLOSE_SECONDS)
        with contextlib.suppress(OSError), self._sending:
            self._send(Done())

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._connection.close()
        for thread in self._threads:
            thread.join(timeout=CONTROL_CLOSE_SECONDS)

    def _send(self, message: FromTask) -> None:
        self._connection.send(encode(message))

    def _send_all(self) -> None:
        while True:
            self._wake.wait(self._timeouts.beat)
            self._wake.clear()
            closing = self._closing
            try:
                with self._sending:
                    self._send_events()
                    self._send(Beat())
            except (OSError, ValueError):
                return  # a lost driver is no failure of this worker
            if closing:
                return

    def _send_events(self) -> None:
        while self._events:
            self._send(self._events.popleft())

    def _receive_all(self) -> None:
        while (line := self._connection.receive()) is not None:
            try:
                message = decode(line, FROM_DRIVER)
            except ProtocolError as error:
                logger.warning("a message from the driver was ignored: %s", error)
                continue
            if isinstance(message, StopRequest):
                self._stop_request = message.reason
                if self._on_stop_request is not None:
                    self._on_stop_request(message.reason)
            elif isinstance(message, RunIsOver):
                self._stopped.set()
            elif (waiting := self._answers.get(message.number)) is not None:
                waiting.put(message)
        self._stopped.set()
        for waiting in list(self._answers.values()):
            waiting.put(None)


# What an unmodified Horovod or DDP script raises when a peer is gone.
_EFFECTS = {"HorovodInternalError", "DistBackendError", "DistNetworkError", "DistStoreError"}


def is_effect(error: BaseException) -> bool:
    """Whether an error most likely follows from another rank's failure."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CommunicationError) or type(seen).__name__ in _EFFECTS:
            return True
        if isinstance(seen, RuntimeError) and "gloo" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
