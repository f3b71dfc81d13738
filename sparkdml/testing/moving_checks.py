"""What collectives that only move tensors must do: nothing lost, nothing changed, in order."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.testing.communicator_checks import (
    MOVED_DTYPES,
    check,
    equal,
    marked_tensors,
    of_rank,
)


@check
def broadcast_from_every_root(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype in MOVED_DTYPES:
            tensor = of_rank(comm.rank, 2, 3, dtype=dtype)
            assert comm.broadcast_(tensor, root) is tensor
            equal(tensor, of_rank(root, 2, 3, dtype=dtype))
    strided = torch.zeros(3, 2).t()
    strided.copy_(of_rank(comm.rank, 2, 3))
    equal(comm.broadcast_(strided).contiguous(), of_rank(0, 2, 3))
    equal(comm.broadcast_(of_rank(comm.rank)), of_rank(0))
    for dtype in MOVED_DTYPES:  # a single item of several, which torch takes for contiguous
        single = of_rank(comm.rank, 4, dtype=dtype)[::2][:1]
        equal(comm.broadcast_(single), of_rank(0, 1, dtype=dtype))
    equal(comm.broadcast_(torch.empty(0, 2)), torch.empty(0, 2))


@check
def broadcast_fills_what_is_conjugated_or_negated_by_a_mark(comm: Communicator) -> None:
    """As torch does: the memory of such a tensor is not what it says."""
    for tensor in marked_tensors(comm.rank):
        comm.broadcast_(tensor)
        for expected in marked_tensors(0):
            if expected.dtype == tensor.dtype:
                equal(tensor.clone(), expected.clone())


@check
def allgather_keeps_rank_order_and_dtype(comm: Communicator) -> None:
    for dtype in MOVED_DTYPES:
        gathered = comm.allgather(of_rank(comm.rank, 2, 3, dtype=dtype))
        assert len(gathered) == comm.size
        for rank, tensor in enumerate(gathered):
            equal(tensor, of_rank(rank, 2, 3, dtype=dtype))
    for rank, tensor in enumerate(comm.allgather(of_rank(comm.rank))):
        equal(tensor, of_rank(rank))


@check
def allgather_takes_uneven_and_empty_first_dimensions(comm: Communicator) -> None:
    # Several sizes in turn, for backends that remember what they saw under a name.
    for turn in range(4):
        lengths = [(rank * 3 + turn) % 4 for rank in range(comm.size)]
        mine = torch.full((lengths[comm.rank], 2), comm.rank, dtype=torch.int64)
        for rank, tensor in enumerate(comm.allgather(mine)):
            equal(tensor, torch.full((lengths[rank], 2), rank, dtype=torch.int64))
    for tensor in comm.allgather(torch.empty(0, 3)):
        equal(tensor, torch.empty(0, 3))


@check
def gathered_tensors_are_independent(comm: Communicator) -> None:
    tensor = of_rank(comm.rank, 2)
    for copy in comm.allgather(tensor):
        copy.zero_()
    equal(tensor, of_rank(comm.rank, 2))


@check
def alltoall_delivers_every_piece(comm: Communicator) -> None:
    for turn in range(4):
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.uint8):

            def piece(source: int, to: int, turn: int = turn, dtype: torch.dtype = dtype) -> Tensor:
                length = (source + 2 * to + turn) % 3
                return torch.full((length, 2), (10 * source + to) % 7).to(dtype)

            received = comm.alltoall([piece(comm.rank, to) for to in range(comm.size)])
            for source, tensor in enumerate(received):
                equal(tensor, piece(source, comm.rank))
    for tensor in comm.alltoall([torch.empty(0)] * comm.size):
        equal(tensor, torch.empty(0))


@check
def gather_gives_the_root_everything(comm: Communicator) -> None:
    for root in range(comm.size):
        gathered = comm.gather(torch.full((comm.rank, 2), comm.rank, dtype=torch.int16), root)
        if comm.rank != root:
            assert gathered is None
            continue
        assert gathered is not None
        for rank, tensor in enumerate(gathered):
            equal(tensor, torch.full((rank, 2), rank, dtype=torch.int16))


@check
def scatter_gives_each_rank_its_part(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype in MOVED_DTYPES:
            parts = [of_rank(rank, rank + 1, 2, dtype=dtype) for rank in range(comm.size)]
            mine = comm.scatter(parts if comm.rank == root else None, root)
            equal(mine, of_rank(comm.rank, comm.rank + 1, 2, dtype=dtype))
    empty = [torch.empty(0, 4)] * comm.size
    equal(comm.scatter(empty if comm.rank == 0 else None), torch.empty(0, 4))
