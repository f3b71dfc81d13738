"""Run an iterator ahead of its consumer, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 10.0


class Prefetch(Iterator[T]):
    """At most `depth` items wait. An error in the source is raised where the item is asked for."""

    def __init__(self, source: Iterator[T], depth: int = 2) -> None:
        self._source = source
        self._items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._finished = False
        self._thread = threading.Thread(target=self._fill, name="sparkdml-prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            for item in self._source:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._items.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __next__(self) -> T:
        if self._finished:
            raise StopIteration
        item, error = self._items.get()
        if error is not None:
            self._finished = True
            self._thread.join()
            raise error
        return item  # type: ignore[return-value]  # an item without an error is a T

    @property
    def is_over(self) -> bool:
        return self._finished

    def close(self) -> None:
        """Stop early: the thread ends after the item that it is at, which may never come."""
        self._finished = True
        self._closed.set()
        self._thread.join(timeout=CLOSE_SECONDS)
