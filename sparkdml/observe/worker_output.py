"""Forwards what a worker prints to the driver, in bounded amounts and at no cost to training.

Runs in a worker, for as long as its task. The output of a Spark Python worker goes to the
executor's log, and still does: the streams are duplicated (`Tee`), never replaced. Any thread may
write, without a lock and without waiting; a thread of `WorkerOutput` sends some of what has
gathered to the driver twice a second, over the worker's control connection. What is too much is
dropped and counted. `logging` is covered as far as it prints: handlers that hold the old streams
are pointed at the tees, and back at the end. What libraries print from C is in the executor's log
alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, TextIO

SEND_SECONDS = 0.5
LINES_PER_SEND = 100
BYTES_PER_SEND = 16_384  # the control client queues up to 1,000 events: 16 MB at most
MAX_LINE_CHARACTERS = 2_000
MAX_WAITING_LINES = 1_000
SENDS_AT_THE_END = 5


class OutputLink(Protocol):
    """The part of the worker's control client that is needed here; neither call may wait."""

    def event(self, kind: str, **fields: Any) -> None: ...

    def flush(self) -> None: ...


class WorkerOutput:
    """While it is open, lines on stdout and stderr also become "output" events of this rank."""

    def __init__(self, client: OutputLink, host: str) -> None:
        self._client, self._host = client, host
        self._waiting: deque[tuple[str, str]] = deque(maxlen=MAX_WAITING_LINES)
        self._num_dropped = 0
        self._pid = os.getpid()
        self._done = threading.Event()
        self._thread = threading.Thread(
            target=self._send_all, name="sparkdml-worker-output", daemon=True
        )
        self._tees: dict[str, Tee] = {}

    def __enter__(self) -> WorkerOutput:
        for name in ("stdout", "stderr"):
            inner = getattr(sys, name)
            if inner is not None:  # a process may have been started without it
                self._tees[name] = Tee(inner, name, self)
                setattr(sys, name, self._tees[name])
        for tee in self._tees.values():
            point_handlers(tee.inner, tee)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, tee in self._tees.items():
            if getattr(sys, name) is tee:  # else other code has wrapped it: leave that in place
                setattr(sys, name, tee.inner)
            tee.close_lines()
            point_handlers(tee, tee.inner)
        self._done.set()
        self._thread.join(timeout=5)
        # A connection that fails can't be reported over itself, and must not fail the task.
        with contextlib.suppress(Exception):
            self._send_the_rest()

    def put(self, stream: str, line: str) -> None:
        """Queue a line: from any thread, even in a signal handler, without a lock or a wait."""
        if os.getpid() != self._pid:
            return  # a forked child (of a DataLoader, say) has no thread to send it
        if len(self._waiting) == MAX_WAITING_LINES:
            self._num_dropped += 1
        self._waiting.append((stream, line))

    def _send_all(self) -> None:
        with contextlib.suppress(Exception):  # as above; what comes later is dropped
            while not self._done.wait(SEND_SECONDS):
                self._send_some()

    def _send_the_rest(self) -> None:
        """Send the newest lines: the last ones before a failure matter most."""
        num_lines, num_bytes = len(self._waiting), sum(_size(line) for _, line in self._waiting)
        while num_lines > SENDS_AT_THE_END * LINES_PER_SEND or (
            num_bytes > SENDS_AT_THE_END * BYTES_PER_SEND
        ):
            num_lines -= 1
            num_bytes -= _size(self._waiting.popleft()[1])
            self._num_dropped += 1
        while self._waiting or self._num_dropped:
            self._send_some()
        self._client.flush()

    def _send_some(self) -> None:
        """Send at most one event per stream, lest output crowd out the run's other events."""
        lines: dict[str, list[str]] = {}
        num_lines = num_bytes = 0
        while self._waiting and num_lines < LINES_PER_SEND and num_bytes < BYTES_PER_SEND:
            stream, line = self._waiting.popleft()
            lines.setdefault(stream, []).append(line)
            num_lines += 1
            num_bytes += _size(line)
        dropped, self._num_dropped = self._num_dropped, 0
        if dropped and not lines:
            lines["stderr"] = []
        for stream, some in lines.items():
            self._client.event(
                "output", host=self._host, stream=stream, lines=some, dropped=dropped
            )
            dropped = 0


class Tee:
    """A text stream that writes to another one, and forwards its lines until `close_lines`.

    A handler or module may hold it beyond the task: then it only writes.
    """

    def __init__(self, inner: TextIO, name: str, output: WorkerOutput) -> None:
        self.inner, self._name = inner, name
        self._output: WorkerOutput | None = output
        self._partial: dict[int, str] = {}  # by thread: `print` writes a line in two pieces

    def write(self, text: str) -> int:
        written = self.inner.write(text)
        self._gather(text)
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def close_lines(self) -> None:
        """Forward the last lines, which may lack their line ends, and stop."""
        for rest in self._partial.values():
            self._put(rest)
        self._partial.clear()
        self._output = None

    def _gather(self, text: str) -> None:
        if self._output is None:
            return
        thread = threading.get_ident()
        text = self._partial.pop(thread, "") + text
        if "\n" in text:
            *lines, text = text.split("\n")
            for line in lines:
                self._put(line)
        if text:
            if "\r" in text:  # a progress bar overwrites its line and never ends it
                text = last_drawn(text) + ("\r" if text.endswith("\r") else "")
            self._partial[thread] = text[: MAX_LINE_CHARACTERS + 1]  # some lines never end

    def _put(self, line: str) -> None:
        line = last_drawn(line)
        if len(line) > MAX_LINE_CHARACTERS:
            line = line[:MAX_LINE_CHARACTERS] + "…"
        if self._output is not None and line:
            self._output.put(self._name, line)


def last_drawn(line: str) -> str:
    """What is visible in the end of a line that was overwritten."""
    return line.rstrip("\r").rpartition("\r")[2]


def _size(line: str) -> int:
    return len(line.encode(errors="replace"))


def point_handlers(old: Any, new: Any) -> None:
    """Make every logging handler that prints to `old` print to `new`."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", []):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
