"""Hands the events of a run to everybody who watches it; none of them can harm the run.

Whoever brings an event only puts it down: those are the threads that also listen to the workers'
heartbeats. One thread hands them out. If an observer never comes back from a call, the run goes on
all the same, unwatched; what waits is bounded.

What an evaluator measured while the workers trained, for the history of the fit.

Prints at the driver what the workers print, each line with its rank and host.

Warns of each restart, where no line of progress would tell of it.

A run from its start to its end, as those who watch it see it.
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
    """Somebody who watches a run. docs/reference-events.md lists the events."""

    def handle(self, rank: int, event: Event) -> None:
        """An event of a rank, or of the driver (-1). Called by one thread."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Observers:
    """Passes each event on, in order. An observer that raises is warned of once and dropped.

    With `run`, events are stamped with it and with the time.
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
        """From any thread; never waits."""
        if self._run is not None:
            event = {"time": time.time(), **event, "run": self._run}
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append((rank, event))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everybody has seen everything, but not for ever, and not a second time."""
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
                f"{self._busy_with} has not come back for {self._close_seconds:g} s: "
                f"{len(self._waiting):,} events of the run were not told to those who watch it",
                stacklevel=2,
            )
        elif self._num_dropped:
            warnings.warn(
                f"those who watch the run were too slow: {self._num_dropped:,} of its events were "
                "left out",
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
        """None when the run is over and everything was told."""
        with self._changed:
            self._busy_with = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            self._busy_with = "an observer"
            return self._waiting.popleft()

    def _call(self, observer: Observer, method: str, *args: Any) -> None:
        self._busy_with = type(observer).__name__
        try:
            getattr(observer, method)(*args)
        except BaseException as error:  # also one that ends its thread: it is everybody's
            self._observers.remove(observer)
            warnings.warn(
                f"{type(observer).__name__} is switched off for the rest of the run, which goes "
                f"on: {type(error).__name__}: {error}",
                stacklevel=2,
            )


class Calls:
    """A function that wants every event, as an observer."""

    def __init__(self, function: Callable[[int, Event], None]) -> None:
        self._function = function

    def handle(self, rank: int, event: Event) -> None:
        self._function(rank, event)

    def close(self) -> None:
        """A function has nothing to close."""


class Evaluations:
    """An observer. `rows` are in the order of steps, each with what was measured after it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "evaluation":
            numbers = {name: event[name] for name in ("epoch", "step", "clock", "seconds")}
            self.rows.append({**numbers, **event["values"]})
        elif event["kind"] == "submission":
            # A run that goes on from a checkpoint makes the steps behind it again.
            self.rows = [row for row in self.rows if row["step"] <= event["from_step"]]

    def close(self) -> None:
        """They are read when the run is over."""


class Communication:
    """An observer of how the workers form their sums; None where it is unknown or not done."""

    def __init__(self) -> None:
        self.backend: str | None = None
        self.topology: str | None = None

    def handle(self, rank: int, event: Event) -> None:
        if event["kind"] == "submission":
            self.backend = event.get("backend")
        elif event["kind"] == "topology":
            self.topology = event["used"]

    def close(self) -> None:
        """Its fields are read when the run is over."""


class OutputPrinter:
    """An observer of "output" events. Lines go above the progress bar, where there is one."""

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] != "output":
            return
        who = f"[{event.get('task', f'rank {rank}')} on {event['host']}]"
        lines = [f"{who} {line}" for line in event["lines"]]
        if event.get("dropped"):
            lines.append(
                f"{who} … {event['dropped']:,} lines more were left out: it prints faster than is "
                "sent on. The executor's log has them all"
            )
        if lines:
            file = sys.stdout if event["stream"] == "stdout" else sys.stderr
            tqdm.write("\n".join(lines), file=file)
            file.flush()

    def close(self) -> None:
        """Nothing is kept back."""


class RestartWarnings:
    """An observer for runs that are otherwise silent."""

    def handle(self, rank: int, event: Event) -> None:
        if event["kind"] == "restart":
            warnings.warn(
                f"{event['cause']}. Going on from step {event['from_step']} (restart "
                f"{event['without_progress']} of {event['allowed']} without progress)",
                stacklevel=2,
            )

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def watched(
    start: Event,
    observers: Sequence[Observer],
    final_fields: Callable[[], dict[str, Any]] = dict,
) -> Iterator[Callable[[int, Event], None]]:
    """Tells that the run starts and how it ends; yields where its events go in between.

    `final_fields` is asked at the end, for what is only known then.
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
        all_observers.drain()  # the last words are of those who have seen it all
        all_observers.handle(-1, {**end, **final_fields(), "kind": "run-end"})
        all_observers.close()
