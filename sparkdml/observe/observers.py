"""Hands the events of a run to everybody who watches it; none of them can harm the run."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

Event = dict[str, Any]


class Observer(Protocol):
    """Somebody who watches a run. docs/reference-events.md lists the events."""

    def handle(self, rank: int, event: Event) -> None:
        """An event of a rank, or of the driver (-1). Called by one thread at a time; be quick."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Observers:
    """Stamps each event with the run and the time, and passes it on.

    An observer that raises is warned of once and gets nothing more.
    """

    def __init__(self, run: str, observers: Sequence[Observer]) -> None:
        self._run = run
        self._observers = list(observers)
        self._lock = threading.Lock()  # events come on one thread a rank

    def handle(self, rank: int, event: Event) -> None:
        stamped = {"time": time.time(), **event, "run": self._run}
        with self._lock:
            for observer in list(self._observers):
                try:
                    observer.handle(rank, stamped)
                except Exception as error:
                    self._drop(observer, error)

    def close(self) -> None:
        with self._lock:
            for observer in list(self._observers):
                try:
                    observer.close()
                except Exception as error:
                    self._drop(observer, error)
            self._observers = []

    def _drop(self, observer: Observer, error: Exception) -> None:
        self._observers.remove(observer)
        warnings.warn(
            f"{type(observer).__name__} is switched off for the rest of the run, which goes on: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )
