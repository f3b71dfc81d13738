"""Checks of collectives, which run on every rank of a communicator.

Reductions: every dtype, op, shape and stride, overlap, and the same bits in every run. Collectives
that only move tensors: nothing is lost or changed, and the order is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator, ReduceOp
from sparkdml.testing.communicator_checks import (
    MOVED_DTYPES,
    REDUCED_DTYPES,
    check,
    equal,
    marked_tensors,
    of_rank,
    reduced,
)


@check
def allreduce_sums_every_dtype(comm: Communicator) -> None:
    for dtype in REDUCED_DTYPES:
        tensor = of_rank(comm.rank, 3, 4, dtype=dtype)
        assert comm.allreduce_(tensor) is tensor
        equal(tensor, reduced(comm.size, "sum", 3, 4, dtype=dtype))


@check
def allreduce_has_every_op(comm: Communicator) -> None:
    ops: tuple[ReduceOp, ...] = ("sum", "min", "max", "product")
    for op in ops:
        for dtype in (torch.float32, torch.int64):
            tensor = comm.allreduce_(of_rank(comm.rank, 5, dtype=dtype), op)
            equal(tensor, reduced(comm.size, op, 5, dtype=dtype))
    mean = comm.allreduce_(of_rank(comm.rank, 5, dtype=torch.float64), "mean")
    assert torch.allclose(mean, reduced(comm.size, "mean", 5, dtype=torch.float64))


@check
def allreduce_takes_any_shape(comm: Communicator) -> None:
    for shape in ((), (1,), (0,), (0, 3), (2, 1, 3), (1000,), (70_000,)):
        tensor = of_rank(comm.rank, *shape) if 0 not in shape else torch.empty(shape)
        expected = reduced(comm.size, "sum", *shape) if 0 not in shape else torch.empty(shape)
        equal(comm.allreduce_(tensor), expected)


@check
def allreduce_changes_only_the_slice(comm: Communicator) -> None:
    whole = torch.full((10,), -1.0)
    whole[3:7] = of_rank(comm.rank, 4)
    comm.allreduce_(whole[3:7])
    equal(whole[3:7], reduced(comm.size, "sum", 4))
    assert (whole[:3] == -1).all()
    assert (whole[7:] == -1).all()


@check
def allreduce_takes_strided_tensors(comm: Communicator) -> None:
    matrix = torch.zeros(4, 3)
    matrix.t().copy_(of_rank(comm.rank, 3, 4))
    comm.allreduce_(matrix.t())
    equal(matrix.t().contiguous(), reduced(comm.size, "sum", 3, 4))
    column = matrix[:, 1]
    column.copy_(of_rank(comm.rank, 4))
    comm.allreduce_(column, "max")
    equal(column.contiguous(), reduced(comm.size, "max", 4))


@check
def allreduce_takes_tensors_that_are_negated_by_a_mark(comm: Communicator) -> None:
    """A sum over the memory would not reveal the fault, but its maximum does."""
    ops: tuple[tuple[ReduceOp, ReduceOp], ...] = (("sum", "sum"), ("max", "min"))
    for op, of_the_opposite in ops:
        expected = -reduced(comm.size, of_the_opposite, 1)
        _, negated = marked_tensors(comm.rank)
        equal(comm.allreduce_(negated, op).clone(), expected)
        _, negated = marked_tensors(comm.rank)
        comm.repeated(negated, op)().wait()
        equal(negated.clone(), expected)


@check
def allreduce_takes_parameters(comm: Communicator) -> None:
    parameter = torch.nn.Parameter(of_rank(comm.rank, 4))
    comm.allreduce_(parameter)
    equal(parameter.detach(), reduced(comm.size, "sum", 4))


@check
def asynchronous_allreduces_overlap(comm: Communicator) -> None:
    tensors = [of_rank(comm.rank, 1 + index % 3) for index in range(100)]
    works = [comm.allreduce_async_(tensor) for tensor in tensors]
    # Each rank waits in its own order: waiting is not a collective.
    for work in works if comm.rank % 2 else reversed(works):
        work.wait()
        work.wait()
    for tensor in tensors:
        equal(tensor, reduced(comm.size, "sum", *tensor.shape))


@check
def a_collective_may_run_while_an_allreduce_is_under_way(comm: Communicator) -> None:
    tensor, other = of_rank(comm.rank, 50), of_rank(comm.rank, 2)
    work = comm.allreduce_async_(tensor)
    comm.broadcast_(other)
    comm.barrier()
    work.wait()
    equal(tensor, reduced(comm.size, "sum", 50))
    equal(other, of_rank(0, 2))


@check
def a_repeated_allreduce_reduces_what_is_there_each_time(comm: Communicator) -> None:
    """A short one and one of several chunks: begun together, and again in the other order."""
    tensors = [torch.empty(100), torch.empty(700_000)]
    begin = [comm.repeated(tensor) for tensor in tensors]
    for turn, order in enumerate(([0, 1], [1, 0], [0], [1])):
        for tensor in tensors:
            tensor.copy_(of_rank(comm.rank, len(tensor)) + turn)
        works = [begin[index]() for index in order]
        for work in works:
            work.wait()
        for index in order:
            count = len(tensors[index])
            equal(tensors[index], reduced(comm.size, "sum", count) + turn * comm.size)
    mean = torch.full((3, 2), float(comm.rank))
    comm.repeated(mean.t(), "mean")().wait()
    equal(mean, torch.full((3, 2), (comm.size - 1) / 2))


@check
def grouped_allreduce_reduces_each(comm: Communicator) -> None:
    tensors = [of_rank(comm.rank, 3), of_rank(comm.rank, 2, 2), of_rank(comm.rank)]
    comm.grouped_allreduce_(tensors)
    for tensor in tensors:
        equal(tensor, reduced(comm.size, "sum", *tensor.shape))
    comm.grouped_allreduce_([])


@check
def reduce_scatter_cuts_as_tensor_split(comm: Communicator) -> None:
    ops: tuple[ReduceOp, ...] = ("sum", "min", "max", "product")
    for length in (0, 1, comm.size - 1, comm.size, 2 * comm.size + 1, 100):
        for op in ops:
            tensor = of_rank(comm.rank, length, 2)
            whole = reduced(comm.size, op, length, 2)
            equal(comm.reduce_scatter(tensor, op), torch.tensor_split(whole, comm.size)[comm.rank])
            equal(tensor, of_rank(comm.rank, length, 2))
    for dtype in REDUCED_DTYPES:
        mine = comm.reduce_scatter(of_rank(comm.rank, 5, dtype=dtype))
        whole = reduced(comm.size, "sum", 5, dtype=dtype)
        equal(mine, torch.tensor_split(whole, comm.size)[comm.rank])
    mean = comm.reduce_scatter(of_rank(comm.rank, 5), "mean")
    whole = reduced(comm.size, "mean", 5)
    assert torch.allclose(mean, torch.tensor_split(whole, comm.size)[comm.rank])


@check
def reduce_gives_the_root_the_result(comm: Communicator) -> None:
    for root in range(comm.size):
        tensor = of_rank(comm.rank, 3)
        assert comm.reduce_(tensor, root, "sum") is tensor
        if comm.rank == root:
            equal(tensor, reduced(comm.size, "sum", 3))


@check
def sums_have_the_same_bits_every_time(comm: Communicator) -> None:
    generator = torch.Generator().manual_seed(comm.rank)
    tensors = [torch.randn(length, generator=generator) for length in (3, 1000, 1000, 5000)]
    first: list[Tensor] | None = None
    for _ in range(15):
        copies = [tensor.clone() for tensor in tensors]
        comm.grouped_allreduce_(copies)
        scattered = comm.reduce_scatter(tensors[1])
        first = first or [*copies, scattered]
        for copy, expected in zip([*copies, scattered], first, strict=True):
            equal(copy, expected)
    assert first is not None
    for copy in comm.allgather(first[1]):
        equal(copy, first[1])


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
    for dtype in MOVED_DTYPES:  # a single item of several, which torch considers contiguous
        single = of_rank(comm.rank, 4, dtype=dtype)[::2][:1]
        equal(comm.broadcast_(single), of_rank(0, 1, dtype=dtype))
    equal(comm.broadcast_(torch.empty(0, 2)), torch.empty(0, 2))


@check
def broadcast_fills_what_is_conjugated_or_negated_by_a_mark(comm: Communicator) -> None:
    """As in torch: the memory of such a tensor differs from its values."""
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
    # Several sizes in turn, for backends that cache tensors by name.
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
