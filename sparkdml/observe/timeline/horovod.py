"""Horovod's own timeline: what its coordinator, rank 0, recorded of each tensor.

Horovod's threads write it to a file: at first only an opening bracket, later a closing one, which
the next events overwrite with a comma. The recorder's thread on rank 0 reads the file while it
grows; complete events become spans on a track of their own. Only the start of the file is read,
since it grows without bound. The temporary folder that holds it lives as long as the recorder.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sparkdml.observe.timeline.trace_file import HOROVOD

WINDOW_BYTES = 1 << 20  # some two thousand collectives

Span = tuple[int, str, int, int, int | None, dict[str, Any] | None]


class HorovodTimeline:
    """Starts Horovod's timeline on rank 0 once Horovod runs, and reads spans from its file."""

    # Horovod refuses to start a timeline later unless this was set when it was initialised; and it
    # hangs in its first collective if it was set on some ranks only.
    ENVIRONMENT = {"HOROVOD_TIMELINE": "DYNAMIC"}

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path = Path()
        self._reader = HorovodReader()
        self._num_read = 0
        self._is_running = False

    @staticmethod
    def is_possible(backend: str) -> bool:
        """The same on all ranks; a user who has set HOROVOD_TIMELINE keeps that file."""
        return backend == "horovod" and "HOROVOD_TIMELINE" not in os.environ

    def start(self) -> None:
        """Call on rank 0, once Horovod is initialised; on other ranks Horovod writes nothing."""
        self._folder = tempfile.TemporaryDirectory(prefix="sparkdml-horovod-timeline-")
        self._path = Path(self._folder.name) / "timeline.json"
        try:
            sys.modules["horovod.torch"].start_timeline(str(self._path))
            self._is_running = True
        except ValueError:  # the user's code has initialised Horovod, without the setting above
            self.close()

    def take(self) -> list[Span]:
        """The spans that are new since the last call."""
        if not self._is_running or not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            text = file.read(4 * WINDOW_BYTES)
        self._num_read += len(text)
        spans = self._reader.read(text)
        if self._num_read > WINDOW_BYTES:
            self.close()
        return spans

    def close(self) -> None:
        if self._folder is None:
            return
        if self._is_running and sys.modules["horovod.torch"].is_initialized():
            sys.modules["horovod.torch"].stop_timeline()
        self._is_running = False
        self._folder.cleanup()
        self._folder = None


class HorovodReader:
    """Parses spans from the pieces of a file that is still being written."""

    def __init__(self) -> None:
        self._rest = ""
        self._decoder = json.JSONDecoder()
        self._tensors: dict[int, str] = {}
        self._open: dict[int, list[dict[str, Any]]] = {}  # by tensor: begun, not ended
        # Its times are on the worker's wall clock, from a start that the first event names.
        self._wall_to_counter = time.perf_counter_ns() - time.time_ns()
        self._start_ns: int | None = None

    def read(self, piece: bytes) -> list[Span]:
        self._rest += piece.decode(errors="replace")
        spans = []
        while (event := self._next_event()) is not None:
            span = self._handle(event)
            if span is not None:
                spans.append(span)
        return sorted(spans, key=lambda span: span[3])

    def _next_event(self) -> dict[str, Any] | None:
        self._rest = self._rest.lstrip("[], \r\n\t")
        if not self._rest:
            return None
        try:
            event, end = self._decoder.raw_decode(self._rest)
        except ValueError:
            return None  # the rest of it is not yet written
        self._rest = self._rest[end:]
        return dict(event)

    def _handle(self, event: dict[str, Any]) -> Span | None:
        kind, tensor = event.get("ph"), event.get("pid", 0)
        if kind == "M":
            known = event.get("args", {})
            if "start_time_since_epoch_in_micros" in known:
                self._start_ns = int(known["start_time_since_epoch_in_micros"]) * 1000
            elif event.get("name") == "process_name":
                self._tensors[tensor] = str(known.get("name", tensor))
            return None
        begun = self._open.setdefault(tensor, [])
        if kind == "B":
            if begun:
                begun[-1]["has parts"] = True
            begun.append(dict(event))
        elif kind == "X" and begun:
            begun[-1]["last rank"] = event.get("name")  # a rank has joined the negotiation
        elif kind == "E" and begun:
            return self._end(begun.pop(), event, tensor)
        return None

    def _end(self, begin: dict[str, Any], end: dict[str, Any], tensor: int) -> Span | None:
        """A span for each innermost event, so that spans of a track need no nesting."""
        if self._start_ns is None or begin.get("has parts"):
            return None
        zero = self._start_ns + self._wall_to_counter
        args = {"tensor": self._tensors.get(tensor, str(tensor))}
        if "last rank" in begin:
            args["last rank"] = str(begin["last rank"])
        begin_ns, end_ns = (zero + int(float(e["ts"]) * 1000) for e in (begin, end))
        return HOROVOD, str(begin.get("name", "?")), begin_ns, end_ns, None, args
