"""Checks of point to point (if a communicator has it), of splitting, and of refused arguments."""

from __future__ import annotations

import pytest
import torch

from sparkdml.comm.base import Communicator, PointToPoint
from sparkdml.errors import ParameterError
from sparkdml.testing.communicator_checks import MOVED_DTYPES, check, equal, of_rank, reduced


def _messages(comm: Communicator) -> PointToPoint | None:
    """Point to point, or None if there is none or no other rank."""
    return comm.point_to_point if comm.size > 1 else None


@check
def messages_go_around_a_ring(comm: Communicator) -> None:
    messages = _messages(comm)
    if messages is None:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in MOVED_DTYPES:
        received = torch.zeros(3, 2, dtype=dtype)
        sending = messages.isend(of_rank(comm.rank, 3, 2, dtype=dtype), after)
        assert messages.recv_(received, before) == before
        sending.wait()
        equal(received, of_rank(before, 3, 2, dtype=dtype))


@check
def messages_with_tags_overtake(comm: Communicator) -> None:
    messages = _messages(comm)
    if messages is None:
        return
    if comm.rank == 0:
        sending = [messages.isend(torch.tensor([float(tag)]), 1, tag) for tag in (1, 2)]
        for work in sending:
            work.wait()
    elif comm.rank == 1:
        first, second = torch.zeros(1), torch.zeros(1)
        messages.recv_(second, 0, tag=2)
        messages.recv_(first, 0, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)
    comm.barrier()


@check
def messages_of_one_tag_keep_their_order(comm: Communicator) -> None:
    messages = _messages(comm)
    if messages is None:
        return
    if comm.rank == 0:
        for number in range(5):
            messages.send(torch.tensor([number]), 1)
    elif comm.rank == 1:
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
        works = [messages.irecv_(box, 0) for box in boxes]
        for work in reversed(works):
            work.wait()
        assert torch.cat(boxes).tolist() == [0, 1, 2, 3, 4]
    comm.barrier()


@check
def messages_come_from_anyone(comm: Communicator) -> None:
    messages = _messages(comm)
    if messages is None:
        return
    if comm.rank == 0:
        senders = []
        for _ in range(1, comm.size):
            box = torch.zeros(2, 2).t()
            senders.append(messages.recv_(box, tag=9))
            equal(box.contiguous(), of_rank(senders[-1], 2, 2))
        assert sorted(senders) == list(range(1, comm.size))
    else:
        messages.send(of_rank(comm.rank, 2, 2), 0, tag=9)
    comm.barrier()


@check
def messages_in_a_group_use_its_ranks(comm: Communicator) -> None:
    group = comm.split(color=0, key=-comm.rank)
    messages = _messages(group)
    if messages is not None and group.rank < 2:
        if group.rank == 0:
            messages.send(torch.tensor([comm.rank]), 1)
        else:
            box = torch.zeros(1, dtype=torch.int64)
            assert messages.recv_(box) == 0
            assert box.item() == comm.size - 1
    group.close()


@check
def messages_to_no_rank_are_refused(comm: Communicator) -> None:
    messages = comm.point_to_point
    if messages is None:
        return
    for wrong in (comm.rank, comm.size, -1):
        with pytest.raises(ParameterError, match="to must be"):
            messages.send(torch.ones(1), wrong)
        with pytest.raises(ParameterError, match="source must be"):
            messages.irecv_(torch.ones(1), wrong)


@check
def split_makes_groups_by_color(comm: Communicator) -> None:
    group = comm.split(color=comm.rank % 2)
    mine = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (group.rank, group.size) == (mine.index(comm.rank), len(mine))
    total = group.allreduce_(torch.tensor([float(comm.rank)]))
    equal(total, torch.tensor([float(sum(mine))]))
    gathered = group.allgather(torch.tensor([comm.rank]))
    assert torch.cat(gathered).tolist() == mine
    equal(group.broadcast_(torch.tensor(comm.rank), group.size - 1), torch.tensor(mine[-1]))
    # The parent still works while its groups are open.
    equal(comm.allreduce_(of_rank(comm.rank, 2)), reduced(comm.size, "sum", 2))
    group.close()
    equal(comm.allreduce_(of_rank(comm.rank, 2)), reduced(comm.size, "sum", 2))


@check
def split_orders_by_key(comm: Communicator) -> None:
    group = comm.split(color=7, key=-comm.rank)
    backwards = list(reversed(range(comm.size)))
    assert group.rank == backwards.index(comm.rank)
    assert torch.cat(group.allgather(torch.tensor([comm.rank]))).tolist() == backwards
    equal(group.broadcast_(torch.tensor(comm.rank), 0), torch.tensor(backwards[0]))
    group.close()


@check
def groups_can_be_split_by_their_members_alone(comm: Communicator) -> None:
    outer = comm.split(color=int(comm.rank > 0))
    if comm.rank > 0:
        inner = outer.split(color=outer.rank % 2)
        mine = [rank for rank in range(1, comm.size) if (rank - 1) % 2 == outer.rank % 2]
        assert torch.cat(inner.allgather(torch.tensor([comm.rank]))).tolist() == mine
        inner.close()
    outer.close()
    comm.barrier()


@check
def misuse_is_refused_with_the_reason(comm: Communicator) -> None:
    # Only calls that every rank refuses by itself, so that all ranks stay in step.
    number = torch.ones(2)
    with pytest.raises(ParameterError, match="op must be one of"):
        comm.allreduce_(number, "median")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="mean"):
        comm.allreduce_(torch.ones(2, dtype=torch.int64), "mean")
    with pytest.raises(ParameterError, match="dtype"):
        comm.allreduce_(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ParameterError, match="dtype"):
        comm.allreduce_(torch.ones(2, dtype=torch.complex64))
    for wrong in (-1, comm.size):
        with pytest.raises(ParameterError, match="root must be a rank"):
            comm.broadcast_(number, wrong)
    with pytest.raises(ParameterError, match="one tensor for each"):
        comm.alltoall([number] * (comm.size + 1))
    with pytest.raises(ParameterError, match="at least one dimension"):
        comm.reduce_scatter(torch.tensor(1.0))
    if comm.size > 1:
        with pytest.raises(ParameterError, match="equal on all ranks"):
            comm.allgather(torch.ones(2, 1 + comm.rank))
        with pytest.raises(ParameterError, match="equal on all ranks"):
            comm.allgather(torch.ones(2, dtype=(torch.float32, torch.int32)[comm.rank % 2]))
    equal(comm.allreduce_(of_rank(comm.rank, 2)), reduced(comm.size, "sum", 2))
