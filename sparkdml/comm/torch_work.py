"""Waiting for torch's work, with its errors turned into ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sparkdml.comm.alarm import LOOK_EVERY_SECONDS, Alarm
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
