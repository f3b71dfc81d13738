"""The trace of a run at the driver: events of all ranks, made of what arrives, ready to write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from sparkdml.observe.timeline.thinned import ThinnedEvents
from sparkdml.observe.timeline.tracks import DRIVER_PID, DRIVER_TID, Lanes, thread_name

MAX_TEXT = 2000  # of a failure's cause, on a mark

# The marks of a run: its event, what the mark says, which of the event's fields it shows.
MARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run-start": ("run {name} starts", ("strategy", "backend", "workers", "epochs", "batch_size")),
    "submission": ("submission {number}", ("workers", "hosts", "from_step")),
    "epoch": ("epoch {epoch} ends", ()),
    "checkpoint": ("checkpoint {id}", ("step", "bytes", "copy_seconds", "write_seconds", "parent")),
    "failure": ("failure", ("failed_rank", "host", "cause", "step")),
    "restart": ("restart", ("cause", "from_step", "workers")),
    "run-end": ("run {outcome}", ("cause", "seconds", "stopped")),
}


class Trace:
    """All times are microseconds since the run's start, by the driver's clock."""

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
        known = {name: fields.get(name, "?") for name in ("name", "number", "epoch", "id")}
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
        """0 for an aligned clock; else so that the spans end when their message arrives."""
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
