"""What splitting must do, and how misuse is refused."""

from __future__ import annotations

import pytest
import torch

from sparkdml.comm.base import Communicator
from sparkdml.errors import ParameterError
from sparkdml.testing.communicator_checks import (
    check,
    equal,
    of_rank,
    reduced,
)


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
    # The parent still works beside its groups.
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
    # Only what every rank refuses by itself: afterwards all still agree on what was called.
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
    with pytest.raises(ParameterError, match="first dimension"):
        comm.reduce_scatter(torch.tensor(1.0))
    if comm.size > 1:
        with pytest.raises(ParameterError, match="alike"):
            comm.allgather(torch.ones(2, 1 + comm.rank))
        with pytest.raises(ParameterError, match="alike"):
            comm.allgather(torch.ones(2, dtype=(torch.float32, torch.int32)[comm.rank % 2]))
    equal(comm.allreduce_(of_rank(comm.rank, 2)), reduced(comm.size, "sum", 2))
