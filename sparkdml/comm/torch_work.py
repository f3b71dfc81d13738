"""Waits for torch's collectives and messages, polls the alarm meanwhile, and translates errors.

A wait for a collective polls the alarm between short time-outs. A wait for a message can't: when it
times out, gloo breaks all connections of the group. That is what is wanted once the run has failed,
so a thread (`MessageWatch`) polls the alarm and then lets a receive of its own time out.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch

from sparkdml.comm.torch_groups import Alarm, Groups
from sparkdml.errors import CommunicationError
from sparkdml.network.timeouts import ALARM_LOOK_SECONDS

_LOOK_EVERY = timedelta(seconds=ALARM_LOOK_SECONDS)


class TorchWork:
    """A collective in flight in one of torch's process groups."""

    __slots__ = ("_alarm", "_work")

    def __init__(self, work: Any, alarm: Alarm) -> None:
        self._work, self._alarm = work, alarm

    def wait(self) -> None:
        while not self._is_done():
            self._alarm.check()

    def _is_done(self) -> bool:
        try:
            self._work.wait(_LOOK_EVERY)
            return True
        except RuntimeError:
            if not self._work.is_completed():
                return False
        # The wait may have timed out just before the work completed, so ask the work again.
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failed(error, self._alarm) from error
        return True


class PlainWork:
    """Work that is awaited without a time-out.

    This is NCCL's, where a wait only orders streams and a time-out would block the host, and gloo's
    receive from any rank, where a time-out breaks all connections.
    """

    __slots__ = ("_alarm", "_work")

    def __init__(self, work: Any, alarm: Alarm) -> None:
        self._work, self._alarm = work, alarm

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failed(error, self._alarm) from error

    @property
    def source(self) -> int:
        """After `wait`: the rank that sent the message."""
        return int(self._work._source_rank())


def failed(error: RuntimeError, alarm: Alarm) -> CommunicationError:
    """Convert torch's error to a CommunicationError to raise, and sound the alarm."""
    first_line = str(error).partition("\n")[0]
    failure = CommunicationError(f"a collective failed; a rank is probably gone: {first_line}")
    alarm.sound(str(failure))
    return failure


THREAD_NAME = "sparkdml-message-watch"

_UNUSED_TAG = (1 << 31) - 1
_AT_ONCE = timedelta(milliseconds=1)


class MessageWatch:
    """Ends waits for messages of one communicator when the run has failed.

    Its thread runs from the first wait until `close`, or until the communicator is garbage. It
    can't end gloo's receives from any rank, which have no connection that could break.
    """

    def __init__(self, groups: Groups, rank: int, size: int, alarm: Alarm) -> None:
        self._groups, self._alarm = groups, alarm
        self._peers = [peer for peer in range(size) if peer != rank]
        self._waiting: set[MessageWork] = set()
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def enter(self, work: MessageWork) -> None:
        """Register a wait; called for every message, so it must be fast."""
        self._waiting.add(work)
        if self._thread is None:
            self._start()

    def leave(self, work: MessageWork) -> None:
        self._waiting.discard(work)

    def end_waits(self) -> None:
        """Make all waits raise. Afterwards the group is unusable and its peers disconnected."""
        group = self._groups.get("cpu")
        if group is None or not self._waiting:
            return
        # One time-out breaks all connections, but a receive from a lost peer does not time out.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        self._closed.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_poll,
                    args=(weakref.ref(self), self._closed),
                    name=THREAD_NAME,
                    daemon=True,
                )
                self._thread.start()

    def look(self, waited: set[MessageWork]) -> set[MessageWork]:
        """Return the current waits; `waited` are those of the last poll."""
        waiting = self._waiting.copy()
        if waited & waiting:  # only long waits are worth a question to the driver
            try:
                self._alarm.check()
            except CommunicationError:
                self.end_waits()
        return waiting


def _poll(reference: weakref.ref[MessageWatch], closed: threading.Event) -> None:
    waited: set[MessageWork] = set()
    while not closed.wait(ALARM_LOOK_SECONDS / 2) and (watch := reference()) is not None:
        waited = watch.look(waited)
        del watch  # so that the communicator and its connections can be freed meanwhile


class MessageWork:
    """A message in flight."""

    __slots__ = ("_alarm", "_watch", "_work")

    def __init__(self, work: Any, alarm: Alarm, watch: MessageWatch) -> None:
        self._work, self._alarm, self._watch = work, alarm, watch

    def wait(self) -> None:
        self._watch.enter(self)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise message_failed(error, self._alarm) from error
        finally:
            self._watch.leave(self)


def message_failed(error: RuntimeError, alarm: Alarm) -> CommunicationError:
    """Convert torch's error, preferring the alarm's reason if that broke the connections."""
    try:
        alarm.check()
    except CommunicationError as told:
        return told
    return failed(error, alarm)
