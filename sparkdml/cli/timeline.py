"""`sparkdml timeline PATH`: summarizes the trace that a run with timeline= wrote."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from sparkdml.errors import ParameterError
from sparkdml.observe.timeline.summary import as_text, summarize
from sparkdml.observe.timeline.trace_file import fault_of, read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="the trace file, as given to timeline=")
    parser.add_argument("--top", type=int, default=5, help="how many costs to show (default: 5)")
    parser.add_argument("--json", action="store_true", help="print all costs as JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    if options.top < 1:
        raise ParameterError("--top", options.top, "at least 1")
    trace = read_trace(options.path)
    if trace.about.get("writer") != "sparkdml" and not trace.is_cut:
        raise ParameterError(
            "path",
            options.path,
            "a trace written by sparkdml",
            "Open other traces in https://ui.perfetto.dev.",
        )
    sound = [event for event in trace.events if fault_of(event) is None]
    summary = summarize(sound)
    if options.json:
        print(json.dumps({**asdict(summary), "about": trace.about}))
        return 0
    notes = []
    if trace.is_cut:
        notes.append("the file is truncated; this is the part that could be read")
    if len(sound) < len(trace.events):
        notes.append(f"{len(trace.events) - len(sound)} events could not be read")
    if trace.about.get("thinned"):
        notes.append(f"thinned to {trace.about['kept']}")
    print(as_text(summary, options.path, options.top, tuple(notes)))
    return 0
