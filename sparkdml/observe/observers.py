"""Observers of a run, and the queue that delivers events to them without risk to the run.

Runs in the driver, one `Observers` per run. Events are put into its queue by the threads that also
receive the workers' heartbeats, which therefore never wait; a thread of its own delivers them to
all observers in turn, and ends with the run. The queue is bounded. An observer that raises is
dropped with a warning; if one blocks, the run continues and no more events are delivered.

The small observers are here too: what fits need for their history (`Evaluations`,
`Communication`), what prints workers' output (`OutputPrinter`) and warns of restarts
(`RestartWarnings`), and a user's function as an observer (`Calls`).
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

from tqdm.auto import tqdm

MAX_WAITING = 10_000
CLOSE_SECONDS = 40.0  # longer than any observer of ours waits for its own server

Event = dict[str, Any]


class Observer(Protocol):
    """Receives the events of a run, which docs/reference-events.md lists."""

    def handle(self, rank: int, event: Event) -> None:
        """An event of a rank, or of the driver (-1). Called by one thread."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Observers:
    """Delivers each event to all observers, in order, and drops an observer that raises.

    With `run`, each event gets it as its `run`, and the present time as its `time`.
    """

    def __init__(
        self,
        observers: Sequence[Observer],
        run: str | None = None,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._observers = list(observers)
        self._run = run
        self._close_seconds = close_seconds
        self._waiting: deque[tuple[int, Event]] = deque()
        self._changed = threading.Condition()
        self._busy_with: str | None = None
        self._num_dropped = 0
        self._closing = self._given_up = False
        self._thread = threading.Thread(target=self._work, name="sparkdml-observers", daemon=True)
        self._thread.start()

    def __enter__(self) -> Observers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def handle(self, rank: int, event: Event) -> None:
        """Queue an event: from any thread, without waiting."""
        if self._run is not None:
            event = {"time": time.time(), **event, "run": self._run}
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append((rank, event))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until all events are delivered; after a time-out `close` does not wait again."""
        with self._changed:
            self._given_up = not self._changed.wait_for(
                lambda: not self._waiting and self._busy_with is None, self._close_seconds
            )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(0 if self._given_up else self._close_seconds)
        if self._thread.is_alive():
            warnings.warn(
                f"observer {self._busy_with} has been blocked for {self._close_seconds:g} s: "
                f"{len(self._waiting):,} events of the run were not delivered",
                stacklevel=2,
            )
        elif self._num_dropped:
            warnings.warn(
                f"observers could not keep up: {self._num_dropped:,} run events were dropped",
                stacklevel=2,
            )

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            for observer in list(self._observers):
                self._call(observer, "handle", *entry)
        for observer in list(self._observers):
            self._call(observer, "close")

    def _next(self) -> tuple[int, Event] | None:
        """None when the run is over and all events are delivered."""
        with self._changed:
            self._busy_with = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            self._busy_with = "(unknown)"
            return self._waiting.popleft()

    def _call(self, observer: Observer, method: str, *args: Any) -> None:
        self._busy_with = type(observer).__name__
        try:
            getattr(observer, method)(*args)
        except BaseException as error:  # SystemExit too would end the thread for all observers
            self._observers.remove(observer)
            warnings.warn(
                f"observer {type(observer).__name__} failed and gets no more events; the run "
                f"continues. {type(error).__name__}: {error}",
                stacklevel=2,
            )


class Calls:
    """A user's function `on_event(rank, event)` as an observer."""

    def __init__(self, function: Callable[[int, Event], None]) -> None:
        self._function = function

    def handle(self, rank: int, event: Event) -> None:
        self._function(rank, event)

    def close(self) -> None:
        """A function has nothing to close."""


class Evaluations:
    """Collects what an evaluator measured: `rows` in the order of steps, for the history."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "evaluation":
            numbers = {name: event[name] for name in ("epoch", "step", "clock", "seconds")}
            self.rows.append({**numbers, **event["values"]})
        elif event["kind"] == "submission":
            # A run that resumes from a checkpoint repeats the steps after it.
            self.rows = [row for row in self.rows if row["step"] <= event["from_step"]]

    def close(self) -> None:
        """`rows` are read when the run is over."""


class Communication:
    """Notes how the workers form their sums, for the history; None if they form none."""

    def __init__(self) -> None:
        self.backend: str | None = None
        self.topology: str | None = None

    def handle(self, rank: int, event: Event) -> None:
        if event["kind"] == "submission":
            self.backend = event.get("backend")
        elif event["kind"] == "topology":
            self.topology = event["used"]

    def close(self) -> None:
        """The fields are read when the run is over."""


class OutputPrinter:
    """Prints what workers print, with rank and host, above the progress bar if there is one."""

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] != "output":
            return
        who = f"[{event.get('task', f'rank {rank}')} on {event['host']}]"
        lines = [f"{who} {line}" for line in event["lines"]]
        if event.get("dropped"):
            lines.append(
                f"{who} … {event['dropped']:,} more lines were dropped, because this rank prints "
                "faster than its output is forwarded. The executor's log has all of them"
            )
        if lines:
            file = sys.stdout if event["stream"] == "stdout" else sys.stderr
            tqdm.write("\n".join(lines), file=file)
            file.flush()

    def close(self) -> None:
        """Every line has been printed."""


class RestartWarnings:
    """Warns of each restart, for runs without a progress bar."""

    def handle(self, rank: int, event: Event) -> None:
        if event["kind"] == "restart":
            warnings.warn(
                f"{event['cause']}. Resuming from step {event['from_step']} (restart "
                f"{event['without_progress']} of {event['allowed']} without a new checkpoint)",
                stacklevel=2,
            )

    def close(self) -> None:
        """Warnings are given at once."""


@contextmanager
def watched(
    start: Event,
    observers: Sequence[Observer],
    final_fields: Callable[[], dict[str, Any]] = dict,
) -> Iterator[Callable[[int, Event], None]]:
    """Send run-start and run-end around a run; yields the function that takes its other events.

    `final_fields` is called at the end, for fields of run-end that are known only then.
    """
    all_observers = Observers(observers, run=uuid.uuid4().hex[:12])
    all_observers.handle(-1, {**start, "kind": "run-start"})
    began = time.monotonic()
    outcome, cause = "finished", None
    try:
        yield all_observers.handle
    except BaseException as error:
        outcome = "failed" if isinstance(error, Exception) else "interrupted"
        cause = (str(error) or type(error).__name__).partition("\n")[0]
        raise
    finally:
        end = {"outcome": outcome, "cause": cause, "seconds": time.monotonic() - began}
        all_observers.drain()  # observers give some of the final fields
        all_observers.handle(-1, {**end, **final_fields(), "kind": "run-end"})
        all_observers.close()
