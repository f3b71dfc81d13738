"""Trace files: how they are laid out, written, read, and checked.

A trace has a process for each rank, and in it a thread for each kind of work: its tracks. `Lanes`
is the state of one rank's tracks, which the driver's `Trace` owns.

Writing is atomic, by the timeline's thread at the driver. Reading, by the command line, accepts a
file that its writer left incomplete. The checks say whether viewers can draw every event and every
track.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdml.errors import ParameterError

TRAINING, COMMUNICATION, CHECKPOINT_WRITER, HOROVOD = 1, 2, 3, 4

TRACK_NAMES = {
    TRAINING: "training",
    COMMUNICATION: "communication",
    CHECKPOINT_WRITER: "checkpoint writer",
    HOROVOD: "Horovod",
}
DRIVER_PID = 1_000_000  # a rank's process id is its rank; viewers take no negative ones
DRIVER_TID = 1
LANES_APART = 10  # from a lane's thread id to that of the next lane of the same track


class Lanes:
    """Spreads spans that overlap, such as collectives under way at once, over several threads.

    A viewer draws a thread's spans as a stack, so those of one thread must not overlap.
    """

    def __init__(self) -> None:
        self._ends: dict[int, list[float]] = {}  # of each lane's last span, by track

    def place(self, track: int, begin: float, end: float) -> int:
        """The thread id of a span. Spans of a track are placed in the order of their ends."""
        if track == TRAINING:
            return track  # one thread: its spans nest by themselves
        ends = self._ends.setdefault(track, [])
        for lane, last in enumerate(ends):
            if last <= begin:
                ends[lane] = end
                return track + lane * LANES_APART
        ends.append(end)
        return track + (len(ends) - 1) * LANES_APART


def track_of(tid: int) -> int:
    return tid % LANES_APART


def thread_name(tid: int) -> str:
    lane = tid // LANES_APART
    name = TRACK_NAMES.get(track_of(tid), f"track {track_of(tid)}")
    return f"{name} ({lane + 1})" if lane else name


PHASES = {"X", "i", "M"}  # spans, marks, and the names of processes and threads
SCOPES = {"g", "p", "t"}
ROUNDING_US = 2e-3  # times are written with three digits


def find_faults(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with each event or track, in words; empty if nothing is."""
    faults: list[str] = []
    tracks: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for number, event in enumerate(events):
        problem = fault_of(event)
        if problem is not None:
            faults.append(f"event {number}: {problem}: {dict(event)}")
        elif event["ph"] == "X":
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for (pid, tid), spans in tracks.items():
        faults.extend(f"process {pid}, thread {tid}: {fault}" for fault in faults_of_track(spans))
    return faults


def fault_of(event: Mapping[str, Any]) -> str | None:
    if event.get("ph") not in PHASES:
        return f"ph must be one of {', '.join(sorted(PHASES))}"
    if not isinstance(event.get("name"), str) or not event["name"]:
        return "no name"
    if not all(is_whole(event.get(field)) for field in ("pid", "tid")):
        return "pid and tid must be whole numbers of at least 0"
    if not isinstance(event.get("args", {}), Mapping):
        return "args must be an object"
    if event["ph"] == "M":
        return None if event.get("args") else "a name or an order must be in args"
    if not is_number(event.get("ts")):
        return "ts must be a number"
    if event["ph"] == "i" and event.get("s") not in SCOPES:
        return "a mark needs a scope (s): g, p or t"
    if event["ph"] == "X" and not (is_number(event.get("dur")) and event["dur"] >= 0):
        return "dur must be a number of at least 0"
    return None


def faults_of_track(spans: Iterable[tuple[float, float, str]]) -> list[str]:
    """Spans must be ordered by their begin, and each lie within or beside the others."""
    faults: list[str] = []
    last = -math.inf
    enclosing: list[tuple[float, str]] = []
    for begin, end, name in spans:
        if begin < last:
            faults.append(f"{name} at {begin} comes after a span that begins at {last}")
        last = begin
        while enclosing and enclosing[-1][0] <= begin + ROUNDING_US:
            enclosing.pop()
        if enclosing and end > enclosing[-1][0] + ROUNDING_US:
            faults.append(f"{name} ({begin} to {end}) outlasts {enclosing[-1][1]}")
        enclosing.append((end, name))
    return faults


def is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(float(value))  # type: ignore[arg-type]  # a number, as checked


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


Event = dict[str, Any]


@dataclass(frozen=True)
class TraceFile:
    """The content of a trace file."""

    events: list[Event]
    about: dict[str, Any]  # facts about the trace as a whole
    is_cut: bool = False  # the file was incomplete; these are its complete events


def local_path(path: str) -> Path:
    """The path on the driver's disk; a ParameterError, before the run, if it can't be one."""
    plain = path.removeprefix("file://")
    if "://" in plain:
        raise ParameterError(
            "timeline", path, "a path on the driver's disk", "Copy the file once the run is over."
        )
    place = Path(plain).absolute()
    if place.is_dir():
        raise ParameterError("timeline", path, "a file", f"For instance {place / 'run.json'}.")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ParameterError(
            "timeline", path, "a file in a folder that can be written", f"See {place.parent}."
        )
    return place


def write_trace(path: Path, events: Iterable[str], about: Mapping[str, Any]) -> None:
    """Write `events` as JSON. The old file is replaced only when the new one is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(f'{head[:-1]}, "traceEvents": [\n')
            file.write(",\n".join(events))
            file.write("\n]}\n")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def read_trace(path: str) -> TraceFile:
    """An object with traceEvents or a bare list of events, with or without its end."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ParameterError("path", path, "a trace file", f"{error.strerror}.") from error
    try:
        content, is_cut = json.loads(text), False
    except ValueError:
        content, is_cut = complete_events(text), True
    events = content.get("traceEvents") if isinstance(content, dict) else content
    about = content.get("otherData", {}) if isinstance(content, dict) else {}
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ParameterError(
            "path", path, "a trace: JSON with a list of events", "Is it the file of timeline=?"
        )
    return TraceFile(events, about if isinstance(about, dict) else {}, is_cut)


def complete_events(text: str) -> list[Event] | None:
    """The complete events of a list without its end; None if there is no list."""
    start = text.find("[")
    if start < 0:
        return None
    decoder = json.JSONDecoder()
    events: list[Event] = []
    position = start + 1
    while True:
        while position < len(text) and text[position] in ", \r\n\t":
            position += 1
        try:
            event, position = decoder.raw_decode(text, position)
        except ValueError:
            return events
        events.append(event)
