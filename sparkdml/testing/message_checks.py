"""What point to point must do, where a communicator has it."""

from __future__ import annotations

import pytest
import torch

from sparkdml.comm.base import Communicator, PointToPoint
from sparkdml.errors import ParameterError
from sparkdml.testing.communicator_checks import MOVED_DTYPES, check, equal, of_rank


def _messages(comm: Communicator) -> PointToPoint | None:
    """None also where there is nobody to talk to."""
    return comm.point_to_point if comm.size > 1 else None


@check
def messages_go_round_a_ring(comm: Communicator) -> None:
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
def messages_to_nobody_are_refused(comm: Communicator) -> None:
    messages = comm.point_to_point
    if messages is None:
        return
    for wrong in (comm.rank, comm.size, -1):
        with pytest.raises(ParameterError, match="to must be"):
            messages.send(torch.ones(1), wrong)
        with pytest.raises(ParameterError, match="source must be"):
            messages.irecv_(torch.ones(1), wrong)
