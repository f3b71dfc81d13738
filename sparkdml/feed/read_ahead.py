"""Reading the next item while this one's communication is under way.

Runs on the thread of its consumer, unlike `feed.Prefetch`: what it hides is not the reading itself
but its unevenness. Ranks are never quite alike; one that arrives early at a collective would only
wait, so it reads its next batch in that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")


class ReadAhead(Iterator[T]):
    """An iterator whose next item can be read before it is asked for.

    Args:
        source: read in order, by one thread.
        timed: entered around each reading ahead, to tell where that time goes.
    """

    def __init__(
        self,
        source: Iterator[T],
        timed: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._source, self._timed = source, timed
        self._ahead: list[T] = []  # one item at most

    def advance(self) -> None:
        """Read the next item now, unless that has been done; nothing at the source's end."""
        if self._ahead:
            return
        with self._timed():
            for item in self._source:
                self._ahead.append(item)
                break

    def __next__(self) -> T:
        return self._ahead.pop() if self._ahead else next(self._source)
