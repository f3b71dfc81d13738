"""Ctrl-C as a wish: the first is noted for whoever watches the run, the second is an exception.

Spark's own handler of the signal cancels all jobs before Python hears of it, so that there would be
nothing left to keep: it stands aside until the second.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Inside of the block, and only on the main thread, which alone gets signals."""

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
            "\nstopping after this step; the model so far is kept. Ctrl-C again to give it up",
            file=sys.stderr,
            flush=True,
        )
