"""The trace of a run: spans and marks of all ranks, bounded in number, and the file that has them.

Runs in the driver. `Timeline` is an observer: it is handed events on the observers' thread, and a
thread of its own adds them to the `Trace` and rewrites the file every second or so until the run
ends. Beyond a limit, `ThinnedEvents` keeps whole steps at the start and the end, and a sample in
between.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import chain
from typing import Any

from sparkdml.errors import ParameterError
from sparkdml.observe.timeline.trace_file import (
    DRIVER_PID,
    DRIVER_TID,
    Lanes,
    local_path,
    thread_name,
    write_trace,
)

StepKey = tuple[int, int]  # the number of the submission, and of the step
# Sorts by begin, what encloses before what it encloses; then the event itself as JSON.
Line = tuple[float, float, str]

HEAD, TAIL, OTHERS = 0.15, 0.25, 0.25  # shares of the limit
AFTER_THINNING = 0.75


class ThinnedEvents:
    """At most `limit` events; those of a step are kept or dropped together, others last."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_seen = 0
        self._steps: dict[StepKey, list[Line]] = {}
        self._others: list[Line] = []
        self._marks: list[Line] = []
        self._num_kept = 0
        self._stride = 1

    @property
    def is_thinned(self) -> bool:
        return self._num_kept < self.num_seen

    def add(self, line: Line, step: StepKey | None = None, is_mark: bool = False) -> None:
        self.num_seen += 1
        self._num_kept += 1
        if is_mark:
            self._marks.append(line)
        elif step is None:
            self._others.append(line)
        else:
            self._steps.setdefault(step, []).append(line)
        if self._num_kept > self.limit:
            self._thin()

    def lines(self) -> list[Line]:
        """All events, in the order of time."""
        if self._stride > 1:
            self._drop_steps()  # late events of dropped steps are incomplete steps
        return sorted(chain(self._marks, self._others, *self._steps.values()))

    def describe(self) -> dict[str, Any]:
        """Facts that a reader of the trace must know."""
        return {
            "thinned": self.is_thinned,
            "events": self._num_kept,
            "events dropped": self.num_seen - self._num_kept,
            "kept": "all that was recorded"
            if not self.is_thinned
            else "whole steps at the start, at the end, and in between those whose number is a "
            f"multiple of {self._stride}",
        }

    def _thin(self) -> None:
        self._others = drop_every_second(self._others, int(self.limit * OTHERS))
        self._marks = drop_every_second(self._marks, int(self.limit * OTHERS / 2))
        self._drop_steps()  # events since the last time, by the present stride
        largest = max((step for _, step in self._steps), default=0)
        while self._num_kept > self.limit * AFTER_THINNING and self._stride <= largest:
            self._stride *= 2
            self._drop_steps()

    def _drop_steps(self) -> None:
        order = sorted(self._steps)
        start = self._reach(order, int(self.limit * HEAD))
        end = self._reach(order[::-1], int(self.limit * TAIL))
        for key in order[start : max(start, len(order) - end)]:
            if key[1] % self._stride:
                del self._steps[key]
        self._count()

    def _reach(self, keys: list[StepKey], num_events: int) -> int:
        """How many of these steps have that many events in total; at least one."""
        for place, key in enumerate(keys):
            num_events -= len(self._steps[key])
            if num_events < 0:
                return max(1, place)
        return len(keys)

    def _count(self) -> None:
        steps = sum(map(len, self._steps.values()))
        self._num_kept = steps + len(self._others) + len(self._marks)


def drop_every_second(lines: list[Line], limit: int) -> list[Line]:
    """Thin what lies between the first and the last quarter, until there are few enough."""
    while len(lines) > max(4, limit):
        lines.sort()
        quarter = len(lines) // 4
        middle = lines[quarter : len(lines) - quarter]
        lines = [*lines[:quarter], *middle[::2], *lines[len(lines) - quarter :]]
    return lines


MAX_TEXT = 2000  # of a failure's cause, on a mark

# The marks of a run: the kind of event, the mark's text, the fields of the event that it shows.
MARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run-start": ("run {name} starts", ("strategy", "backend", "workers", "epochs", "batch_size")),
    "submission": ("submission {number}", ("workers", "hosts", "from_step", "backend")),
    "topology": ("topology {used}", ("asked",)),
    "epoch": ("epoch {epoch} ends", ()),
    "checkpoint": ("checkpoint {id}", ("step", "bytes", "copy_seconds", "write_seconds", "parent")),
    "failure": ("failure", ("failed_role", "failed_rank", "host", "cause", "step")),
    "restart": ("restart", ("cause", "from_step", "workers")),
    "run-end": ("run {outcome}", ("cause", "seconds", "stopped")),
}


class Trace:
    """All times are microseconds since the run's start, on the driver's clock."""

    def __init__(self, start_seconds: float, max_events: int) -> None:
        self._start = start_seconds
        self._events = ThinnedEvents(max_events)
        self._submission = 0
        self._hosts: dict[int, list[str]] = {}
        self._lanes: dict[int, Lanes] = {}
        self._threads: dict[tuple[int, int], str] = {}
        self._shifts: dict[tuple[int, int], float] = {}  # of ranks whose clock is not aligned
        self._uncertainty: dict[int, float] = {}
        self._every = 1  # the largest stride of the steps that workers recorded
        self._outcome: str | None = None

    def handle(self, rank: int, event: dict[str, Any]) -> bool:
        """Whether the event changed the trace."""
        kind = event.get("kind")
        if kind == "spans":
            self._add_spans(rank, event)
            return True
        if kind not in MARKS:
            return False
        if kind == "restart" or (kind == "submission" and event.get("number", 1) > 1):
            # One of the two would do: the steps that follow may have the numbers of earlier ones.
            self._submission += 1
        if kind == "run-end":
            self._outcome = str(event.get("outcome"))
        self._add_mark(str(kind), event)
        return True

    def lines(self) -> Iterator[str]:
        """Every event as JSON: names first, then the rest in the order of time."""
        yield from map(json.dumps, self._names())
        for _, _, text in self._events.lines():
            yield text

    def about(self) -> dict[str, Any]:
        started = datetime.fromtimestamp(self._start, timezone.utc)
        return {
            "writer": "sparkdml",
            "started": started.isoformat(timespec="milliseconds"),
            "outcome": self._outcome or "unfinished",
            "clock uncertainty in microseconds": {
                f"rank {rank}": round(value, 1) for rank, value in sorted(self._uncertainty.items())
            },
            "recorded": "every step"
            if self._every == 1
            else f"one step of {self._every} where steps were quickest",
            **self._events.describe(),
        }

    def _add_mark(self, kind: str, event: dict[str, Any]) -> None:
        fields = {**event, **{"epoch": int(event["row"]["epoch"])}} if "row" in event else event
        text, shown = MARKS[kind]
        known = {name: fields.get(name, "?") for name in ("name", "number", "epoch", "id", "used")}
        name = text.format(**known, outcome=fields.get("outcome", "ends"))
        args = event["row"] if "row" in event else {n: event[n] for n in shown if n in event}
        args = {n: v[:MAX_TEXT] if isinstance(v, str) else v for n, v in args.items()}
        ts = round((float(event["time"]) - self._start) * 1e6, 3)
        mark = {"ph": "i", "name": name, "cat": kind, "ts": ts, "s": "g", "args": args}
        self._add({**mark, "pid": DRIVER_PID, "tid": DRIVER_TID}, is_mark=True)

    def _add_spans(self, rank: int, event: dict[str, Any]) -> None:
        hosts = self._hosts.setdefault(rank, [])
        if event["host"] not in hosts:
            hosts.append(event["host"])
        self._every = max(self._every, int(event["every"]))
        zero = (event["origin"] - round(self._start * 1e9)) / 1e3 + self._shift(rank, event)
        lanes = self._lanes.setdefault(rank, Lanes())
        for track, name, begin, duration, step, args in event["spans"]:
            ts = zero + begin
            tid = lanes.place(track, ts, ts + duration)
            span = {"ph": "X", "name": name, "ts": round(ts, 3), "dur": round(duration, 3)}
            known = args or {}
            if step is not None:
                known = {"step": step, **known}
            if known:
                span["args"] = known
            key = None if step is None else (self._submission, step)
            self._add({**span, "pid": rank, "tid": tid}, key)

    def _shift(self, rank: int, event: dict[str, Any]) -> float:
        """0 for an aligned clock; else what makes the spans end as their message arrives."""
        if event["uncertainty"] is not None:
            self._uncertainty[rank] = event["uncertainty"]
            return 0.0
        key = (rank, self._submission)
        if key not in self._shifts:
            last = max(span[2] + span[3] for span in event["spans"])
            self._shifts[key] = (float(event["time"]) * 1e9 - event["origin"]) / 1e3 - last
        return self._shifts[key]

    def _add(
        self, event: dict[str, Any], key: tuple[int, int] | None = None, is_mark: bool = False
    ) -> None:
        self._threads.setdefault(
            (event["pid"], event["tid"]), "run" if is_mark else thread_name(event["tid"])
        )
        text = json.dumps(event, separators=(",", ":"))
        self._events.add((event["ts"], -event.get("dur", 0.0), text), key, is_mark)

    def _names(self) -> Iterator[dict[str, Any]]:
        for pid in sorted({pid for pid, _ in self._threads}):
            name = "driver"
            if pid != DRIVER_PID:
                name = f"rank {pid} on {', then '.join(self._hosts[pid])}"
            yield _metadata("process_name", pid, 0, name=name)
            order = -1 if pid == DRIVER_PID else pid
            yield _metadata("process_sort_index", pid, 0, sort_index=order)
        for (pid, tid), name in sorted(self._threads.items()):
            yield _metadata("thread_name", pid, tid, name=name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid % 10 * 100 + tid // 10)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


MAX_EVENTS = 100_000  # a file of some 12 MB
WRITE_SECONDS = 1.0
WRITING_SHARE = 0.02  # of the time at most, so a large file is written less often
MAX_WAITING = 5_000


class Timeline:
    """An observer that writes a trace of the run to `path`.

    The file is replaced as a whole every second or so, and so is valid JSON at all times, even if
    the driver is killed. Beyond `max_events`, steps in the middle are left out.
    """

    def __init__(
        self, path: str, max_events: int = MAX_EVENTS, write_seconds: float = WRITE_SECONDS
    ) -> None:
        if max_events < 100:
            raise ParameterError("max_events", max_events, "at least 100")
        self.path = local_path(path)
        self._write_seconds = write_seconds
        self._trace = Trace(time.time(), max_events)
        # Filled by the observers' thread, which must not wait for the disk.
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_WAITING)
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._has_changed = False
        self._write()  # fails now if the file can't be written
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
            except Exception as error:  # a full disk, for instance: the next `handle` raises it
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
