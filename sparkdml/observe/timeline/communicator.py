"""A communicator that records each collective: its name, its bytes, its start and its end.

Runs in a worker, on whichever thread communicates; it owns the communicator that it wraps, and adds
spans to the worker's recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

from torch import Tensor

from sparkdml.comm.base import Communicator, PointToPoint, ReduceOp, Traffic, Work
from sparkdml.observe.timeline.recorder import SpanRecorder
from sparkdml.observe.timeline.trace_file import COMMUNICATION


class TracedWork:
    """Work whose span ends when it has been waited for."""

    __slots__ = ("_begin", "_bytes", "_name", "_spans", "_work")

    def __init__(
        self, work: Work, spans: SpanRecorder, name: str, begin: int, num_bytes: int
    ) -> None:
        self._work: Work | None = work
        self._spans, self._name, self._begin, self._bytes = spans, name, begin, num_bytes

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        args = {"bytes": self._bytes}
        self._spans.add(
            COMMUNICATION, self._name, begin=self._begin, end=perf_counter_ns(), args=args
        )


class TracedCommunicator(Communicator):
    """Behaves as the communicator that it wraps; records in steps that are recorded."""

    def __init__(self, inner: Communicator, spans: SpanRecorder) -> None:
        self._inner, self._spans = inner, spans
        self.rank, self.size = inner.rank, inner.size
        self.traffic, self.topology = inner.traffic, inner.topology

    def count_into(self, traffic: Traffic) -> None:
        super().count_into(traffic)
        self._inner.count_into(traffic)

    def carries(self, tensor: Tensor) -> bool:
        return self._inner.carries(tensor)

    def _record(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        if self._spans.recording:
            args = {"bytes": sum(tensor.nbytes for tensor in tensors)}
            self._spans.add(COMMUNICATION, name, begin=begin, end=perf_counter_ns(), args=args)

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        if not self._spans.recording:
            return self._inner.allreduce_async_(tensor, op)
        begin = perf_counter_ns()
        work = self._inner.allreduce_async_(tensor, op)
        return TracedWork(work, self._spans, name="allreduce", begin=begin, num_bytes=tensor.nbytes)

    def allreduce_(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        begin = perf_counter_ns()
        self._inner.allreduce_(tensor, op)
        self._record("allreduce", begin, [tensor])
        return tensor

    def grouped_allreduce_(self, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> None:
        begin = perf_counter_ns()
        self._inner.grouped_allreduce_(tensors, op)
        self._record("grouped allreduce", begin, tensors)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        begin = perf_counter_ns()
        self._inner.broadcast_(tensor, root)
        self._record("broadcast", begin, [tensor])
        return tensor

    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        begin = perf_counter_ns()
        gathered = self._inner.allgather(tensor, lengths)
        self._record("allgather", begin, gathered)
        return gathered

    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        begin = perf_counter_ns()
        received = self._inner.alltoall(tensors, lengths)
        self._record("alltoall", begin, tensors)
        return received

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        begin = perf_counter_ns()
        part = self._inner.reduce_scatter(tensor, op)
        self._record("reduce-scatter", begin, [tensor])
        return part

    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        begin = perf_counter_ns()
        self._inner.reduce_(tensor, root, op)
        self._record("reduce", begin, [tensor])
        return tensor

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        begin = perf_counter_ns()
        gathered = self._inner.gather(tensor, root)
        self._record("gather", begin, [tensor] if gathered is None else gathered)
        return gathered

    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        begin = perf_counter_ns()
        part = self._inner.scatter(tensors, root)
        self._record("scatter", begin, [part] if tensors is None else tensors)
        return part

    def barrier(self) -> None:
        begin = perf_counter_ns()
        self._inner.barrier()
        self._record("barrier", begin, ())

    def split(self, color: int, key: int | None = None) -> Communicator:
        begin = perf_counter_ns()
        part = self._inner.split(color, key)
        self._record("split", begin, ())
        return TracedCommunicator(part, self._spans)

    @property
    def point_to_point(self) -> PointToPoint | None:
        messages = self._inner.point_to_point
        return None if messages is None else TracedMessages(messages, self._spans)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class TracedMessages:
    """Messages between two ranks, recorded like collectives."""

    def __init__(self, inner: PointToPoint, spans: SpanRecorder) -> None:
        self._inner, self._spans = inner, spans

    def _record(self, name: str, begin: int, tensor: Tensor, peer: int) -> None:
        if self._spans.recording:
            args = {"bytes": tensor.nbytes, "peer": peer}
            self._spans.add(COMMUNICATION, name, begin=begin, end=perf_counter_ns(), args=args)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        begin = perf_counter_ns()
        self._inner.send(tensor, to, tag)
        self._record("send", begin, tensor, to)

    def recv_(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        begin = perf_counter_ns()
        sender = self._inner.recv_(tensor, source, tag)
        self._record("receive", begin, tensor, sender)
        return sender

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        begin = perf_counter_ns()
        work = self._inner.isend(tensor, to, tag)
        if not self._spans.recording:
            return work
        return TracedWork(work, self._spans, name="send", begin=begin, num_bytes=tensor.nbytes)

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        begin = perf_counter_ns()
        work = self._inner.irecv_(tensor, source, tag)
        if not self._spans.recording:
            return work
        return TracedWork(work, self._spans, name="receive", begin=begin, num_bytes=tensor.nbytes)
