"""Asynchronous work that must run in the order in which it was begun, the same on every rank.

It runs on the thread that waits for it, or on a thread of its own (`InOrderOnThread`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from sparkdml.errors import CommunicationError


class Step:
    """A piece of work; `wait` runs it, after all work that was begun before it."""

    __slots__ = ("_order", "_run", "is_done")

    def __init__(self, order: InOrder, run: Callable[[], None]) -> None:
        self._order, self._run = order, run
        self.is_done = False

    def do(self) -> None:
        self._run()
        self.is_done = True

    def wait(self) -> None:
        while not self.is_done:
            self._order.do_next()


class InOrder:
    """Work that runs when a thread waits for it.

    After one piece has failed, all later ones fail too, as the ranks no longer agree on the next.
    """

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._doing = threading.Lock()
        self._failure: str | None = None
        self._untold: BaseException | None = None  # the failure, until a waiting thread raises it

    def begin(self, run: Callable[[], None]) -> Step:
        step = Step(self, run)
        self._steps.append(step)
        return step

    @property
    def is_idle(self) -> bool:
        """Whether all work is done, and none has failed."""
        return not self._steps and self.is_at_rest and self._failure is None

    @property
    def is_at_rest(self) -> bool:
        """Whether no thread is running a piece; after `close`, none will."""
        return not self._doing.locked()

    def finish(self) -> None:
        """Run all work that was begun."""
        while self._steps:
            self.do_next()

    def do(self, run: Callable[[], None]) -> None:
        """Run `run` on this thread, after all work that was begun."""
        self.finish()
        with self._doing:
            self._try(run)

    def do_next(self) -> None:
        """Run the oldest piece, or wait until another thread has run it."""
        with self._doing:
            self._check()
            if self._steps:
                self._try(self._steps.popleft().do)

    def _check(self) -> None:
        if self._failure is None:
            return
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold
        raise CommunicationError(self._failure)

    def _try(self, run: Callable[[], None]) -> None:
        self._check()
        try:
            run()
        except BaseException as error:
            self._failure = f"an earlier allreduce failed: {error}"
            raise

    def close(self) -> None:
        """Drop work that has not run; later waits for it raise."""
        self._failure = self._failure or "this communicator is closed"
        self._steps.clear()


class InOrderOnThread(InOrder):
    """Work that runs on a background thread, or on a waiting thread if that is sooner."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._thread: threading.Thread | None = None
        self._more = threading.Semaphore(0)

    def begin(self, run: Callable[[], None]) -> Step:
        step = super().begin(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._more.release()
        return step

    def _work(self) -> None:
        while self._failure is None:
            self._more.acquire()
            with self._doing:
                if self._failure is not None or not self._steps:
                    continue
                try:
                    self._try(self._steps.popleft().do)
                except BaseException as error:
                    # The first wait raises this error itself, as it is more specific than "an
                    # earlier allreduce failed".
                    self._untold = error

    def close(self, patience_seconds: float = 10.0) -> None:
        super().close()
        if self._thread is not None:
            self._more.release()
            self._thread.join(patience_seconds)
            self._thread = None
