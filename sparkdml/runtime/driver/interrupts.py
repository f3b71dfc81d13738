"""Ctrl-C while a run is watched: the first asks for an early end, the second is an exception.

Lives on the driver's main thread, which alone gets signals. Spark's own handler of the signal
cancels all jobs before Python sees it, and there would be no model left to keep: it is put aside
until the second Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Installs the handler for the length of a `with` block; on other threads it does nothing."""

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps and threading.current_thread() is threading.main_thread()
        self._noted = False
        self._before: Any = None

    def take(self) -> bool:
        """Whether there was a Ctrl-C since the last call."""
        noted, self._noted = self._noted, False
        return noted

    def __enter__(self) -> Interrupts:
        if self._keeps:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keeps:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No locks and no sockets in here: the watching thread is the one that was interrupted.
        self._noted = True
        signal.signal(signal.SIGINT, self._before)
        print(
            "\nStopping after this step and keeping the model trained so far. Press Ctrl-C again "
            "to stop at once and discard it.",
            file=sys.stderr,
            flush=True,
        )
