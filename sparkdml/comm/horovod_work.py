"""Horovod's collectives under way: their names, waiting for them, their errors.

Horovod itself is handed in: only `horovod.py` imports it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sparkdml.comm.alarm import LOOK_EVERY_SECONDS, Alarm
from sparkdml.errors import CommunicationError

# How many reductions of one kind may be under way before the oldest is waited for.
NAMES_A_KIND = 8

# Horovod's own wait spins for ever, and on a busy host takes the core that its communication thread
# needs. Sleeping from the start costs half a millisecond in each small allreduce, since an idle
# core wakes slowly. So: spin, giving way to whoever wants the core, then sleep.
SPIN_SECONDS = 3e-3
PAUSE_SECONDS = 500e-6

# Where there is no sched_yield, a sleep of nothing is the nearest thing.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class HorovodWork:
    """A collective under way; `result` is there after `wait`."""

    __slots__ = ("_alarm", "_handle", "_hvd", "result")

    def __init__(self, hvd: Any, handle: Any, alarm: Alarm | None) -> None:
        self._hvd, self._handle, self._alarm = hvd, handle, alarm
        self.result: Any = None

    def wait(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        with communication_errors(self._alarm):
            sleep_at = time.perf_counter() + SPIN_SECONDS
            while not self._hvd.poll(handle):
                if time.perf_counter() > sleep_at:
                    self._sleep_until_done(handle)
                    break
                _give_way()
            self.result = self._hvd.synchronize(handle)

    def _sleep_until_done(self, handle: Any) -> None:
        look_at = time.monotonic() + LOOK_EVERY_SECONDS
        while not self._hvd.poll(handle):
            if self._alarm is not None and time.monotonic() > look_at:
                self._alarm.check()
                look_at = time.monotonic() + LOOK_EVERY_SECONDS
            time.sleep(PAUSE_SECONDS)


class Names:
    """A name for each collective: the same on all ranks, and seldom a new one.

    Horovod agrees on a tensor by its name, and remembers the agreement for names that it has seen
    with the same shape. So names are counted for each kind of call, in the order of the calls,
    which is the same on all ranks, and come round again. One that is still under way is awaited.
    """

    def __init__(self) -> None:
        self._num_calls: dict[str, int] = {}
        self._under_way: dict[str, HorovodWork] = {}

    def next(self, kind: str) -> str:
        place = self._num_calls.get(kind, 0) % NAMES_A_KIND
        self._num_calls[kind] = place + 1
        name = f"sparkdml.{kind}.{place}"
        earlier = self._under_way.pop(name, None)
        if earlier is not None:
            earlier.wait()
        return name

    def started(self, name: str, work: HorovodWork) -> None:
        self._under_way[name] = work


@contextmanager
def communication_errors(alarm: Alarm | None) -> Iterator[None]:
    """HorovodInternalError, a RuntimeError, becomes CommunicationError, and the others are told."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        failure = CommunicationError(f"a collective failed; a peer is probably gone: {first_line}")
        if alarm is not None:
            alarm.sound(str(failure))
        raise failure from error
