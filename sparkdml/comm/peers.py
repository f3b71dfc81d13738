"""Point-to-point messages with any backend, through a group of its own if the backend has none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from sparkdml.comm.base import Communicator, PointToPoint
from sparkdml.network.timeouts import PEERS_LOOK_SECONDS

Result = TypeVar("Result")


def open_peers(comm: Communicator) -> Communicator:
    """Open a communicator of all ranks that has point to point; every rank calls it.

    It is a separate group, so that one thread can use it while another runs collectives. Horovod,
    which has no point to point, creates its groups with torch.
    """
    return comm.split(0)


def messages_of(peers: Communicator) -> PointToPoint:
    messages = peers.point_to_point
    assert messages is not None, "a split communicator has point to point"
    return messages


def join(thread: threading.Thread, comm: Communicator) -> None:
    """Wait for a thread that exchanges messages; a failure of another rank ends the wait, too.

    Gloo does not interrupt a receive from any rank when one of them is gone.
    """
    while thread.is_alive():
        thread.join(PEERS_LOOK_SECONDS)
        if thread.is_alive():
            comm.check()


class Watched(Generic[Result]):
    """Makes calls that may block in gloo on a background thread, so that the caller can give up.

    When another rank fails, `call` raises even if the message never arrives.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm = comm
        self._calls: queue.Queue[Callable[[], Result] | None] = queue.Queue()
        self._results: queue.Queue[tuple[Result | None, BaseException | None]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Result]) -> Result:
        self._calls.put(function)
        while True:
            try:
                result, error = self._results.get(timeout=PEERS_LOOK_SECONDS)
            except queue.Empty:
                self._comm.check()
                continue
            if error is not None:
                raise error
            return result  # type: ignore[return-value]  # without an error it is one

    def close(self, patience_seconds: float) -> None:
        """End the thread, unless it is blocked."""
        self._calls.put(None)
        self._thread.join(patience_seconds)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put((function(), None))
            except BaseException as error:
                self._results.put((None, error))
