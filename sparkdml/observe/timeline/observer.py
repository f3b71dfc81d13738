"""The timeline at the driver: takes the events of a run, and keeps the file up to date."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from sparkdml.errors import ParameterError
from sparkdml.observe.timeline.trace import Trace
from sparkdml.observe.timeline.trace_file import local_path, write_trace

MAX_EVENTS = 100_000  # a file of some 12 MB
WRITE_SECONDS = 1.0
WRITING_SHARE = 0.02  # of the time at most: a large file is written less often
MAX_WAITING = 5_000


class Timeline:
    """An observer that writes a trace of the run to `path`.

    The file is replaced as a whole every second or so, and is valid JSON at all times, whoever is
    killed. Beyond `max_events`, steps in the middle are left out.
    """

    def __init__(
        self, path: str, max_events: int = MAX_EVENTS, write_seconds: float = WRITE_SECONDS
    ) -> None:
        if max_events < 100:
            raise ParameterError("max_events", max_events, "at least 100")
        self.path = local_path(path)
        self._write_seconds = write_seconds
        self._trace = Trace(time.time(), max_events)
        # Filled by the thread that brings events, which must not wait for the disk.
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_WAITING)
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._has_changed = False
        self._write()  # finds out now whether it can be written
        self._thread = threading.Thread(target=self._keep, name="sparkdml-timeline", daemon=True)
        self._thread.start()

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._waiting.append((rank, event))

    def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._take()
        self._write()

    def _keep(self) -> None:
        pause = self._write_seconds
        while not self._closing.wait(pause):
            try:
                self._take()
                seconds = self._write() if self._has_changed else 0.0
            except Exception as error:  # a full disk, for instance: told by the next `handle`
                self._error = error
                return
            pause = max(self._write_seconds, seconds / WRITING_SHARE)

    def _take(self) -> None:
        for _ in range(len(self._waiting)):
            rank, event = self._waiting.popleft()
            self._has_changed |= self._trace.handle(rank, event)

    def _write(self) -> float:
        started = time.thread_time()
        self._has_changed = False
        write_trace(self.path, self._trace.lines(), self._trace.about())
        return time.thread_time() - started
