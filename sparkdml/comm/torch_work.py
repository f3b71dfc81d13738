"""Waiting for torch's work, with its errors turned into ours.

Waits for gloo's messages, which end when the alarm is sounded.

Such a wait can't look up now and then, as that for a collective does: when its time is up, gloo
breaks all connections of the group. But that is just what is wanted once the run has failed. So a
thread looks at the alarm for those who wait, and then lets a receive of its own run out of time.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch

from sparkdml.comm.alarm import LOOK_EVERY_SECONDS, Alarm
from sparkdml.comm.torch_groups import Groups
from sparkdml.errors import CommunicationError

_LOOK_EVERY = timedelta(seconds=LOOK_EVERY_SECONDS)


class TorchWork:
    """A collective under way in one of torch's process groups."""

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
        # That may have been the time-out, with the work done a moment later: what became of it is
        # what it says now.
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failed(error, self._alarm) from error
        return True


class PlainWork:
    """Work that is waited for without a time-out.

    NCCL's, where waiting only orders streams and a time-out would block the host; and gloo's
    message from anyone, where a time-out breaks all connections.
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
        """After `wait`: the rank that a message came from."""
        return int(self._work._source_rank())


def failed(error: RuntimeError, alarm: Alarm) -> CommunicationError:
    """torch's error as ours, to be raised; the other ranks are told at once."""
    first_line = str(error).partition("\n")[0]
    failure = CommunicationError(f"a collective failed; a peer is probably gone: {first_line}")
    alarm.sound(str(failure))
    return failure


THREAD_NAME = "sparkdml-message-watch"

_UNUSED_TAG = (1 << 31) - 1
_AT_ONCE = timedelta(milliseconds=1)


class MessageWatch:
    """For the messages of one communicator: a thread, from the first wait until `close`, or until
    nobody has the communicator any more.

    Gloo does not release who waits for anyone's message: there is nobody from whom it would come.
    """

    def __init__(self, groups: Groups, rank: int, size: int, alarm: Alarm) -> None:
        self._groups, self._alarm = groups, alarm
        self._peers = [peer for peer in range(size) if peer != rank]
        self._waiting: set[MessageWork] = set()
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def enter(self, work: MessageWork) -> None:
        """Called for every message: nothing here may take time."""
        self._waiting.add(work)
        if self._thread is None:
            self._start()

    def leave(self, work: MessageWork) -> None:
        self._waiting.discard(work)

    def end_waits(self) -> None:
        """Make those who wait raise, though their message never comes; the group is of no use then.

        Peers see that the connections are gone.
        """
        group = self._groups.get("cpu")
        if group is None or not self._waiting:
            return
        # One time-out breaks all connections, but with a peer that is gone it does not come to one.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        self._closed.set()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                place = (weakref.ref(self), self._closed)
                self._thread = threading.Thread(
                    target=_look_now_and_then, args=place, name=THREAD_NAME, daemon=True
                )
                self._thread.start()

    def look(self, waited: set[MessageWork]) -> set[MessageWork]:
        """Who waits now; `waited` did so at the last look."""
        waiting = self._waiting.copy()
        if waited & waiting:  # for long: a message on its way costs no question to the driver
            try:
                self._alarm.check()
            except CommunicationError:
                self.end_waits()
        return waiting


def _look_now_and_then(reference: weakref.ref[MessageWatch], closed: threading.Event) -> None:
    waited: set[MessageWork] = set()
    while not closed.wait(LOOK_EVERY_SECONDS / 2) and (watch := reference()) is not None:
        waited = watch.look(waited)
        del watch  # the communicator may go meanwhile, and its connections with it


class MessageWork:
    """A message under way."""

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
    """torch's error as ours: the alarm's reason, where that is why the connections are gone."""
    try:
        alarm.check()
    except CommunicationError as told:
        return told
    return failed(error, alarm)
