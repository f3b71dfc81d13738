"""Trace files: written so that a reader never sees half of one, read even if a writer left half."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdml.errors import ParameterError

Event = dict[str, Any]


@dataclass(frozen=True)
class TraceFile:
    """What was read from a file."""

    events: list[Event]
    about: dict[str, Any]  # what the writer said of the trace as a whole
    is_cut: bool = False  # the writer was killed in the middle; the end was mended


def local_path(path: str) -> Path:
    """Where the driver writes; refuses what is no place on its own disk, before the run."""
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
    """`events` as JSON. The old file is there until the new one is whole: a kill harms neither."""
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
    """The whole events of a list that was cut off; None if there is no list."""
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
