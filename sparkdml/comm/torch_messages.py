"""Point-to-point messages over a torch process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparkdml.comm import arguments
from sparkdml.comm.alarm import Alarm
from sparkdml.comm.base import Work
from sparkdml.comm.layout import in_memory, to_words
from sparkdml.comm.torch_groups import Groups, group_for
from sparkdml.comm.torch_work import MessageWatch, MessageWork, PlainWork, message_failed
from sparkdml.comm.traffic import Traffic


class _Receiving:
    """A message being received into a buffer, and copied from there to its target."""

    def __init__(self, work: Work, buffer: Tensor, target: Tensor) -> None:
        self._work, self._buffer, self._target = work, buffer, target

    def wait(self) -> None:
        self._work.wait()
        if self._buffer is not self._target:
            self._target.copy_(self._buffer)


class TorchMessages:
    """Sends wait until the message has left; a tensor must not change before `isend`'s work ends.

    Sender and receiver must use the same dtype and shape. Gloo can receive from any rank, NCCL
    can't; the alarm does not interrupt a receive from any rank.
    """

    def __init__(
        self,
        groups: Groups,
        rank: int,
        size: int,
        alarm: Alarm,
        watch: MessageWatch,
        traffic: Traffic,
    ) -> None:
        self._groups, self._rank, self._size, self._alarm = groups, rank, size, alarm
        self._watch, self._traffic = watch, traffic

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        if source is not None:
            self.irecv_(tensor, source, tag).wait()
            return source
        target = tensor.detach()
        buffer = in_memory(target)
        begun = self._begin(tensor, lambda group: group.recv_anysource([to_words(buffer)], tag))
        work = PlainWork(begun, self._alarm)
        _Receiving(work, buffer, target).wait()
        return work.source

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        arguments.check_peer("to", to, self._rank, self._size)
        self._traffic.sent(tensor.nbytes)
        return self._watched(tensor, lambda group: group.send([to_words(tensor)], to, tag))

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        arguments.check_peer("source", source, self._rank, self._size)
        target = tensor.detach()
        buffer = in_memory(target)
        work = self._watched(tensor, lambda group: group.recv([to_words(buffer)], source, tag))
        return _Receiving(work, buffer, target)

    def _watched(self, tensor: Tensor, start: Callable[[Any], Any]) -> Work:
        begun = self._begin(tensor, start)
        if tensor.device.type == "cuda":
            return PlainWork(begun, self._alarm)
        return MessageWork(begun, self._alarm, self._watch)

    def _begin(self, tensor: Tensor, start: Callable[[Any], Any]) -> Any:
        group = group_for(self._groups, tensor.device)
        try:
            return start(group)
        except RuntimeError as error:
            raise message_failed(error, self._alarm) from error
