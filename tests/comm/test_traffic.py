"""What a rank sends is counted where it leaves: by messages of ours, and by a ring's formula."""

import pytest
import torch

from sparkdml.comm.base import Traffic
from sparkdml.comm.threads import run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_count_what_a_ring_moves(size):
    def count(comm):
        comm.allreduce_(torch.zeros(12))
        after_sum = (comm.traffic.bytes, comm.traffic.messages)
        comm.reduce_scatter(torch.zeros(12))
        comm.allgather(torch.zeros(12 // size))
        return after_sum, comm.traffic.bytes

    for (num_bytes, messages), in_all in run_threads(size, count):
        assert num_bytes == 2 * 48 * (size - 1) // size
        assert messages == 2 * (size - 1)
        assert in_all == 2 * num_bytes  # a reduce-scatter and an allgather are an allreduce


def test_messages_and_groups_count_for_their_rank():
    def count(comm):
        group = comm.split(color=comm.rank // 2)
        start = comm.traffic.bytes
        wire = group.point_to_point
        if group.rank == 0:
            wire.send(torch.zeros(10), to=1)
        else:
            wire.recv_(torch.zeros(10), source=0)
        group.alltoall([torch.zeros(3), torch.zeros(3)])
        return comm.traffic.bytes - start

    assert run_threads(4, count) == [40 + 12, 12, 40 + 12, 12]


def test_sums_can_be_taken_and_redirected():
    def count(comm):
        mine = Traffic()
        comm.count_into(mine)
        comm.broadcast_(torch.zeros(8))
        first = mine.take()
        comm.barrier()
        return first, mine.take()

    assert run_threads(2, count) == [((16, 1), (0, 0))] * 2
