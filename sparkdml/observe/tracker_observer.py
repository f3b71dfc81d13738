"""Feeds a tracker from the events of a run, on a thread of its own: a server that is slow or gone
costs the run nothing but the numbers that it did not take.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

from sparkdml.errors import SparkDMLError
from sparkdml.observe.trackers import ToldTheOutcome, Tracker, TrackerSettings, check_tracker

STEP_LOSSES_A_SECOND = 2.0  # a tracker is no place for each of a million steps
MAX_WAITING = 10_000
CLOSE_SECONDS = 20.0

_FACTS = ("strategy", "backend", "workers", "epochs", "batch_size", "global_batch", "seed")


class TrackerObserver:
    """An observer: epoch rows, thinned step losses and whatever workers log, in their order.

    Steps and epochs that are trained again after a restart are logged once. An error of the
    tracker is raised by the next call, so that whoever hands out the events can switch this off.
    """

    def __init__(self, tracker: Tracker | TrackerSettings) -> None:
        self._given = check_tracker(tracker)
        self._name = type(tracker).__name__
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._start: dict[str, Any] | None = None
        self._end: tuple[str, str | None] = ("finished", None)
        self._step = self._last_epoch = 0
        self._last_loss_time = 0.0
        self._num_dropped = 0
        self._ready = threading.Condition()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._feed_safely, name="sparkdml-tracker", daemon=True
        )
        self._thread.start()

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        self._raise_error()
        kind = event["kind"]
        if kind == "run-start":
            with self._ready:
                self._start = event
                self._ready.notify()
        elif kind == "steps":
            self._steps(event)
        elif kind == "epoch":
            self._epoch(event["row"])
        elif kind == "evaluation":
            found = {f"evaluator/{name}": value for name, value in event["values"].items()}
            self._put(numbers(found), event["step"])
        elif kind == "log":
            prefix = f"rank_{rank}/" if rank > 0 else ""
            self._put({prefix + name: value for name, value in numbers(event["values"]).items()})
        elif kind == "run-end":
            self._end = (event["outcome"], event.get("cause"))

    def close(self) -> None:
        """Waits for what is on its way, but not for ever; then says what was lost, if anything."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(CLOSE_SECONDS)
        self._raise_error()
        if self._thread.is_alive():
            warnings.warn(
                f"the tracker {self._name} has not answered for {CLOSE_SECONDS:g} s: what it has "
                f"not taken yet ({len(self._waiting):,} entries) may be lost",
                stacklevel=2,
            )
        elif self._num_dropped:
            warnings.warn(
                f"the tracker {self._name} was too slow: {self._num_dropped:,} entries were left "
                "out",
                stacklevel=2,
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise SparkDMLError(
                f"the tracker {self._name} takes no more numbers: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def _steps(self, event: dict[str, Any]) -> None:
        if event["step"] <= self._step:
            return  # trained again after a restart
        self._step = event["step"]
        moment = event.get("time", time.time())
        if moment - self._last_loss_time < 1 / STEP_LOSSES_A_SECOND:
            return
        self._last_loss_time = moment
        step, loss = event["losses"][-1]
        self._put({"step_loss": float(loss)}, step)

    def _epoch(self, row: Mapping[str, float]) -> None:
        if row["epoch"] > self._last_epoch:
            self._last_epoch = int(row["epoch"])
            self._put(numbers(row))

    def _put(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not metrics:
            return
        with self._ready:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append((self._step if step is None else step, metrics))
            self._ready.notify()

    # -- the thread -----------------------------------------------------------------------------

    def _feed_safely(self) -> None:
        try:
            self._feed()
        except Exception as error:
            self._error = error

    def _feed(self) -> None:
        tracker = self._begin()
        if tracker is None:
            return
        try:
            while (entry := self._next()) is not None:
                tracker.log(*entry)
            if tracker is not self._given and isinstance(tracker, ToldTheOutcome):
                tracker.end(*self._end)
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                tracker.close()
            raise
        tracker.close()

    def _begin(self) -> Tracker | None:
        """None if there was no run after all."""
        if isinstance(self._given, Tracker):
            return self._given
        with self._ready:
            self._ready.wait_for(lambda: self._start or self._waiting or self._closing)
            start = self._start
            if start is None and not self._waiting:
                return None
        start = start or {"run": "", "name": "sparkdml"}
        facts = {name: str(start[name]) for name in _FACTS if start.get(name) is not None}
        facts |= {f"plan.{name}": str(value) for name, value in start.get("plan", {}).items()}
        return self._given.begin(start["run"], start["name"], facts)

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """None when the run is over and everything was told."""
        with self._ready:
            self._ready.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that a tracker can draw."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
