"""Builds every collective from the few primitives that a backend must implement.

A backend implements an allreduce for its native dtypes and three ways to move words. This class
adds the rest of the interface: any dtype, any strides, first dimensions that differ or are empty,
receivers that know no sizes in advance, and the reductions that backends lack.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdml.comm.base import (
    Communicator,
    ReduceOp,
    Work,
    check_one_dtype,
    check_one_for_each_rank,
    check_rank,
    check_reduction,
    check_scatterable,
    check_scattered,
    members,
    reduce_in_rank_order,
)
from sparkdml.comm.layout import (
    LAYOUT_LENGTH,
    Layout,
    check_alike,
    check_arrived,
    in_memory,
    known_layouts,
    to_words,
)


class Done:
    """Work that is already finished."""

    def wait(self) -> None:
        return


class _Reduction:
    """Work on a buffer that, once reduced, is divided or copied to its target."""

    __slots__ = ("_buffer", "_divisor", "_target", "_work")

    def __init__(self, work: Work, buffer: Tensor, target: Tensor, divisor: int) -> None:
        self._work: Work | None = work
        self._buffer, self._target, self._divisor = buffer, target, divisor

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if self._divisor != 1:
            self._buffer.div_(self._divisor)
        if self._buffer is not self._target:
            self._target.copy_(self._buffer)


class ComposedCommunicator(Communicator):
    """A subclass implements the primitives at the top; the collectives below use only those."""

    native_dtypes: frozenset[torch.dtype]  # the dtypes of `_start_allreduce`
    metadata_device: torch.device = torch.device("cpu")  # where layouts are exchanged

    @abstractmethod
    def _start_allreduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        """Start reducing a contiguous, non-empty tensor of a native dtype in place, not by mean."""

    @abstractmethod
    def _broadcast_words(self, words: Tensor, root: int) -> None:
        """Broadcast a flat, non-empty tensor in place."""

    @abstractmethod
    def _allgather_words(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        """Return all ranks' words in rank order; rank r sends `counts[r]` of them, not all zero."""

    @abstractmethod
    def _exchange_words(
        self, words: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """Send consecutive pieces to the ranks in order; return the received ones likewise."""

    @abstractmethod
    def _open_split(self, ranks: Sequence[int], color: int) -> Communicator:
        """Open a communicator of these ranks, in this order; every rank calls it."""

    def carries(self, tensor: Tensor) -> bool:
        return tensor.dtype in self.native_dtypes

    def allreduce_async_(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        check_reduction(tensor, op)
        if tensor.numel() == 0:
            return Done()
        target = tensor.detach() if tensor.requires_grad else tensor
        if target.dtype in self.native_dtypes:
            buffer = in_memory(target)
        else:
            wider = torch.float32 if target.is_floating_point() else torch.int32
            buffer = in_memory(target.to(wider))
        self.traffic.allreduced(buffer.nbytes, self.size)
        if op != "mean":
            work = self._start_allreduce(buffer, op)
            return work if buffer is target else _Reduction(work, buffer, target, 1)
        return _Reduction(self._start_allreduce(buffer, "sum"), buffer, target, self.size)

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Tensor:
        check_rank("root", root, self.size)
        if tensor.numel() > 0:
            self.traffic.broadcasted(tensor.nbytes, self.size)
            target = tensor.detach()
            buffer = in_memory(target)
            self._broadcast_words(to_words(buffer), root)
            if buffer is not target and self.rank != root:
                target.copy_(buffer)
        return tensor

    def allgather(self, tensor: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        if lengths is None:
            layouts = self._layouts_of_all_ranks(tensor)
        else:
            layouts = known_layouts(tensor, lengths, self.rank, self.size)
        self.traffic.gathered(tensor.nbytes, self.size)
        counts = [layout.num_words for layout in layouts]
        words = to_words(tensor)
        if any(counts):
            words = self._allgather_words(words, counts)
        if lengths is not None:
            check_arrived(words, layouts)
        return _cut(words, layouts)

    def alltoall(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[Tensor]:
        check_one_for_each_rank(tensors, self.size)
        check_one_dtype(tensors)
        outgoing = [Layout.of(tensor) for tensor in tensors]
        if lengths is None:
            incoming = self._exchange_layouts(outgoing)
            check_alike([Layout(layout.dtype, ()) for layout in incoming])
        else:
            check_alike(outgoing)
            incoming = known_layouts(tensors[self.rank], lengths, self.rank, self.size)
        self._count_sent(tensors)
        words = self._exchange_words(
            torch.cat([to_words(tensor) for tensor in tensors]),
            [layout.num_words for layout in outgoing],
            [layout.num_words for layout in incoming],
        )
        if lengths is not None:
            check_arrived(words, incoming)
        return _cut(words, incoming)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        # Each rank receives all contributions to its own part and adds them in rank order. That
        # sends as much as a ring, in one step instead of size - 1, for any dtype, op and shape.
        check_reduction(tensor, op)
        check_scatterable(tensor)
        parts = torch.tensor_split(tensor.detach().contiguous(), self.size)
        mine = Layout.of(parts[self.rank])
        words = to_words(tensor)
        if words.numel() > 0:
            self.traffic.scattered(tensor.nbytes, self.size)
            words = self._exchange_words(
                words, [Layout.of(part).num_words for part in parts], [mine.num_words] * self.size
            )
        return reduce_in_rank_order(_cut(words, [mine] * self.size), op)

    def reduce_(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> Tensor:
        check_rank("root", root, self.size)
        return self.allreduce_(tensor, op)

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        check_rank("root", root, self.size)
        layouts = self._layouts_of_all_ranks(tensor)
        nothing = [0] * self.size
        send_counts, receive_counts = list(nothing), nothing
        send_counts[root] = layouts[self.rank].num_words
        if self.rank == root:
            receive_counts = [layout.num_words for layout in layouts]
        else:
            self.traffic.sent(tensor.nbytes)
        words = self._exchange_words(to_words(tensor), send_counts, receive_counts)
        return _cut(words, layouts) if self.rank == root else None

    def scatter(self, tensors: Sequence[Tensor] | None, root: int = 0) -> Tensor:
        check_scattered(tensors, self.rank, self.size, root)
        table = torch.zeros(self.size, LAYOUT_LENGTH, dtype=torch.int64)
        if tensors is not None:
            table = torch.tensor([Layout.of(tensor).encode() for tensor in tensors])
        layouts = [
            Layout.decode(row) for row in self.broadcast_(self._metadata(table), root).tolist()
        ]
        mine = layouts[self.rank]
        send_counts, receive_counts = [0] * self.size, [0] * self.size
        receive_counts[root] = mine.num_words
        if tensors is not None:
            send_counts = [layout.num_words for layout in layouts]
            words = torch.cat([to_words(tensor) for tensor in tensors])
            self._count_sent(tensors)
        else:
            words = to_words(torch.empty(0, dtype=mine.dtype, device=self._payload_device()))
        return mine.from_words(self._exchange_words(words, send_counts, receive_counts))

    def split(self, color: int, key: int | None = None) -> Communicator:
        choice = torch.tensor([color, self.rank if key is None else key])
        choices = torch.stack(self.allgather(self._metadata(choice))).tolist()
        colors, keys = [color for color, _ in choices], [key for _, key in choices]
        group = self._open_split(members(colors, keys, self.rank), color)
        group.count_into(self.traffic)
        return group

    def _count_sent(self, tensors: Sequence[Tensor]) -> None:
        """Count one message to each other rank."""
        others = [tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank]
        self.traffic.sent(sum(others), len(others))

    def _payload_device(self) -> torch.device:
        """The device for a tensor that this rank receives without having passed one."""
        return self.metadata_device

    def _metadata(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.metadata_device)

    def _layouts_of_all_ranks(self, tensor: Tensor) -> list[Layout]:
        numbers = self._metadata(torch.tensor(Layout.of(tensor).encode()))
        table = self._allgather_words(numbers, [LAYOUT_LENGTH] * self.size)
        layouts = [Layout.decode(row) for row in table.view(self.size, LAYOUT_LENGTH).tolist()]
        check_alike(layouts)
        return layouts

    def _exchange_layouts(self, outgoing: Sequence[Layout]) -> list[Layout]:
        numbers = self._metadata(torch.tensor([layout.encode() for layout in outgoing]).view(-1))
        counts = [LAYOUT_LENGTH] * self.size
        table = self._exchange_words(numbers, counts, counts)
        return [Layout.decode(row) for row in table.view(self.size, LAYOUT_LENGTH).tolist()]


def _cut(words: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    pieces = torch.split(words, [layout.num_words for layout in layouts])
    return [layout.from_words(piece) for layout, piece in zip(layouts, pieces, strict=True)]
