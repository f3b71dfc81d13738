"""The worker's end of the control wire: it beats, reports events and failures, and asks.

A thread of its own sends everything, so that a slow or dead driver never holds up a training step.
Events are dropped, oldest first, when the driver does not keep up; failures never are.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from sparkdml.errors import CommunicationError, SetupError
from sparkdml.network.connection import Connection, Message
from sparkdml.runtime.protocol.plan import Plan

MAX_WAITING_EVENTS = 1000
MAX_TRACEBACK = 100_000


class ControlClient:
    """Liveness of one worker, as the driver sees it."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        host: str,
        pid: int,
        attempt: int = 0,
        task_id: int | None = None,
    ) -> None:
        try:
            self._wire = Connection.connect(
                (plan.driver_host, plan.driver_port),
                token=plan.token,
                wire="control",
                timeout_seconds=10,
            )
        except OSError as error:
            raise SetupError(
                f"rank {rank} on {host} can't reach the driver at "
                f"{plan.driver_host}:{plan.driver_port}: {error}. Open the driver's ports to the "
                "executors, or set spark.driver.host (on Spark Connect: "
                "spark.sparkdml.driver.host) to an address that they can reach"
            ) from error
        self._wire.send(
            {
                "rank": rank,
                "host": host,
                "pid": pid,
                "role": plan.role.name,
                "attempt": attempt,  # Spark's count of how often this task was started before
                "task_id": task_id,
            }
        )
        self._beat_seconds = plan.heartbeat_seconds
        self._events: deque[Message] = deque(maxlen=MAX_WAITING_EVENTS)
        self._answers: dict[int, queue.Queue[Message | None]] = {}
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
            threading.Thread(target=target, name=f"sparkdml-link-{what}", daemon=True)
            for what, target in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def event(self, kind: str, **fields: Any) -> None:
        """Tell the driver something; sent with the next beat at the latest."""
        self._events.append({"type": "event", "kind": kind, **fields})

    def flush(self) -> None:
        self._wake.set()

    def ask(self, what: str, timeout_seconds: float = 30.0, **fields: Any) -> Any:
        """A question to the driver, from any thread; None if it has no answer."""
        answers: queue.Queue[Message | None] = queue.Queue()
        try:
            with self._sending:
                self._num_questions += 1
                number = self._num_questions
                self._answers[number] = answers
                self._wire.send({"type": "ask", "what": what, "number": number, **fields})
            if self._stopped.is_set():
                return None  # nobody will answer any more
            answer = answers.get(timeout=timeout_seconds)
        except (OSError, queue.Empty):
            return None
        finally:
            self._answers.pop(number, None)
        return None if answer is None else answer.get("answer")

    def report_parts(self, report: Message) -> None:
        """For `ctx.checkpoint`: this rank's parts are in the store, or could not be written."""
        self.ask("parts", **report)

    def report_damaged(self, checkpoint_id: str, why: str) -> None:
        """For `ctx.checkpoint`: this checkpoint can't be read."""
        self.ask("damaged", id=checkpoint_id, why=why)

    def on_stop_request(self, handle: Callable[[str], None]) -> None:
        """Call `handle(reason)`, on another thread, when the driver asks for an early end."""
        self._on_stop_request = handle
        if self._stop_request is not None:
            handle(self._stop_request)  # it came before anybody was there to hear it

    def wait_for_the_end(self, timeout_seconds: float) -> bool:
        """Until the driver ends the run, or is gone; False if that has not come by then."""
        return self._stopped.wait(timeout_seconds)

    def failed(self, error: BaseException) -> None:
        """Report a failure with its traceback, before Spark learns of it. The first one counts."""
        if self._has_failed:
            return
        self._has_failed = True
        text = "".join(traceback.format_exception(error))
        report = {
            "type": "failed",
            "error": type(error).__name__,
            "reason": "".join(traceback.format_exception_only(error)).strip()[-MAX_TRACEBACK:],
            "traceback": text[-MAX_TRACEBACK:],
            "is_effect": is_effect(error),
            "step": self.step,
        }
        # The driver may be gone; then Spark's own report of the task is all that is left.
        with contextlib.suppress(OSError, ValueError), self._sending:
            self._send_events()  # the last words go first: after the failure nobody may listen
            self._wire.send(report)

    def done(self) -> None:
        """Everything went well: the end of this connection is no loss."""
        self._closing = True
        self._wake.set()
        self._threads[0].join(timeout=5)
        with contextlib.suppress(OSError), self._sending:
            self._wire.send({"type": "done"})

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._wire.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _send_all(self) -> None:
        while True:
            self._wake.wait(self._beat_seconds)
            self._wake.clear()
            closing = self._closing
            try:
                with self._sending:
                    self._send_events()
                    self._wire.send({"type": "beat"})
            except (OSError, ValueError):
                return  # losing the driver's collector never kills a run
            if closing:
                return

    def _send_events(self) -> None:
        while self._events:
            self._wire.send(self._events.popleft())

    def _receive_all(self) -> None:
        while (message := self._wire.receive()) is not None:
            if message.get("please") == "stop":
                self._stop_request = str(message.get("reason"))
                if self._on_stop_request is not None:
                    self._on_stop_request(self._stop_request)
            elif "stop" in message:
                self._stopped.set()
            elif (waiting := self._answers.get(message.get("number", 0))) is not None:
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
