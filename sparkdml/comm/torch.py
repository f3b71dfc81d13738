"""The communicator over torch.distributed: gloo for CPU tensors, NCCL for GPU tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from sparkdml.comm.base import PointToPoint, ReduceOp, Traffic, Work, World, check_peer
from sparkdml.comm.composed import ComposedCommunicator
from sparkdml.comm.layout import in_memory, to_words
from sparkdml.comm.torch_groups import (
    Alarm,
    Groups,
    connect_store,
    default_groups,
    fresh_prefix,
    group_for,
    init_default_group,
    make_groups,
)
from sparkdml.comm.torch_work import (
    MessageWatch,
    MessageWork,
    PlainWork,
    TorchWork,
    failed,
    message_failed,
)
from sparkdml.errors import CommunicationError, SetupError
from sparkdml.network.timeouts import ARRIVAL_TIMEOUT_SECONDS


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
        check_peer("to", to, self._rank, self._size)
        self._traffic.sent(tensor.nbytes)
        return self._watched(tensor, lambda group: group.send([to_words(tensor)], to, tag))

    def irecv_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        check_peer("source", source, self._rank, self._size)
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


ABORT_PATIENCE_SECONDS = 1.0

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def _allreduce_options(op: str) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return options


_ALLREDUCE_OPTIONS = {op: _allreduce_options(op) for op in _OPS}


class TorchCommunicator(ComposedCommunicator):
    """Created by `open` or `split`. When a peer is lost, calls raise CommunicationError.

    After `abort`, peers that wait for this rank raise within a second: because their sockets close
    or, where gloo can't be interrupted, through the alarm.
    """

    native_dtypes = frozenset(
        {
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.int8,
            torch.uint8,
        }
    )

    def __init__(
        self,
        groups: Groups,
        rank: int,
        size: int,
        store: Store,
        alarm: Alarm,
        interface: str | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._groups, self._store, self._interface = groups, store, interface
        self._alarm, self._watch = alarm, MessageWatch(groups, rank, size, alarm)
        self._on_close = on_close
        self._num_splits = 0
        self.metadata_device = torch.device("cpu" if "cpu" in groups else "cuda")

    @classmethod
    def open(
        cls, world: World, arrival_timeout_seconds: float = ARRIVAL_TIMEOUT_SECONDS
    ) -> TorchCommunicator:
        """Join torch's default group, or use the one that the user's code has created."""
        if dist.is_initialized():
            found = (dist.get_rank(), dist.get_world_size())
            if found != (world.rank, world.size):
                raise SetupError(
                    f"torch.distributed is already initialised as rank {found[0]} of {found[1]}, "
                    f"but this worker is rank {world.rank} of {world.size}. Call "
                    "destroy_process_group() first, or initialise it from the environment."
                )
            server = dist.distributed_c10d._get_default_store()
            store, alarm = fresh_prefix(server, world.rank), Alarm(server)
            return cls(
                default_groups(),
                world.rank,
                world.size,
                store=store,
                alarm=alarm,
                interface=world.interface,
            )
        store, alarm = connect_store(world, arrival_timeout_seconds)
        return cls(
            init_default_group(store, world),
            world.rank,
            world.size,
            store=store,
            alarm=alarm,
            interface=world.interface,
            on_close=dist.destroy_process_group,
        )

    def _begin(self, start: Callable[[Any], Any], device: torch.device) -> Work:
        """Start a collective in this device's group."""
        group = group_for(self._groups, device)
        try:
            work = start(group)
        except RuntimeError as error:
            raise failed(error, self._alarm) from error
        return (PlainWork if device.type == "cuda" else TorchWork)(work, self._alarm)

    def _start_allreduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        options = _ALLREDUCE_OPTIONS[op]
        return self._begin(lambda group: group.allreduce([tensor], options), tensor.device)

    def _broadcast_words(self, words: Tensor, root: int) -> None:
        self._start_broadcast(words, root).wait()

    def _start_broadcast(self, words: Tensor, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._begin(lambda group: group.broadcast([words], options), words.device)

    def _allgather_words(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        gathered = words.new_empty(sum(counts))
        if len(set(counts)) == 1:
            self._begin(lambda group: group._allgather_base(gathered, words), words.device).wait()
            return gathered
        # Gloo gathers only equal sizes. A broadcast from each rank moves no more than necessary,
        # while padding to the longest could need many times the memory.
        pieces = torch.split(gathered, list(counts))
        pieces[self.rank].copy_(words)
        under_way = [
            self._start_broadcast(piece, root)
            for root, piece in enumerate(pieces)
            if piece.numel() > 0
        ]
        for work in under_way:
            work.wait()
        return gathered

    def _exchange_words(
        self, words: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        received = words.new_empty(sum(receive_counts))
        self._begin(
            lambda group: group.alltoall_base(
                received, words, list(receive_counts), list(send_counts), dist.AllToAllOptions()
            ),
            words.device,
        ).wait()
        return received

    def _payload_device(self) -> torch.device:
        return torch.device("cuda" if "cuda" in self._groups else "cpu")

    def barrier(self) -> None:
        self._begin(lambda group: group.barrier(), self.metadata_device).wait()

    def _open_split(self, ranks: Sequence[int], color: int) -> TorchCommunicator:
        self._num_splits += 1
        store = PrefixStore(f"split/{self._num_splits}/{color}", self._store)
        rank, size = list(ranks).index(self.rank), len(ranks)
        groups = make_groups(store, rank, size=size, kinds=self._groups, interface=self._interface)
        return TorchCommunicator(
            groups, rank, size=size, store=store, alarm=self._alarm, interface=self._interface
        )

    @property
    def point_to_point(self) -> PointToPoint:
        return TorchMessages(
            self._groups,
            self.rank,
            size=self.size,
            alarm=self._alarm,
            watch=self._watch,
            traffic=self.traffic,
        )

    def check(self) -> None:
        self._alarm.check()

    def close(self) -> None:
        if not self._groups:
            return
        try:
            # A rank that left first would cut off the others' reads.
            self.barrier()
        except CommunicationError:
            self.abort()
            raise
        self._release()

    def abort(self) -> None:
        if not self._groups:
            return
        self._alarm.sound(f"rank {self.rank} of {self.size} aborted")
        self._watch.end_waits()  # of this rank's other threads
        # Releasing a group waits for its collectives in flight, which may never end.
        releasing = threading.Thread(target=self._release, name="sparkdml-abort", daemon=True)
        releasing.start()
        releasing.join(ABORT_PATIENCE_SECONDS)

    def _release(self) -> None:
        self._watch.close()
        self._groups, groups = {}, self._groups
        on_close, self._on_close = self._on_close, None
        groups.clear()
        if on_close is not None:
            on_close()
