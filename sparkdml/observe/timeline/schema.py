"""What a trace must be for a viewer to draw it: a check of every event, and of every track."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

PHASES = {"X", "i", "M"}  # spans, marks, and the names of processes and threads
SCOPES = {"g", "p", "t"}
ROUNDING_US = 2e-3  # times are written with three digits


def find_faults(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with each event or track, in words; nothing if all is well."""
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
    """Spans must come in the order of their begin, and each lie within or beside the others."""
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
