"""What really leaves a process, by the kernel's own count of its sockets' bytes."""

import os
import socket
import struct

import pytest
import torch
from torch import nn

from sparkdml.compression.base import Uncompressed
from sparkdml.compression.half import FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.training.flat import FlatParams
from sparkdml.training.totals import ROWS

NUM_STEPS = 3
BYTES_SENT = 200  # where struct tcp_info has tcpi_bytes_sent


def bytes_sent():
    """By all TCP connections of this process that are open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:
            continue  # gone since it was listed
        with socket.socket(fileno=copy) as one:
            if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                total += struct.unpack_from("=Q", info, BYTES_SENT)[0]
    return total


def reduce_a_million(comm, scheme):
    torch.manual_seed(comm.rank)
    params = FlatParams(nn.Sequential(nn.Linear(784, 1000), nn.Linear(1000, 215)), num_stats=7)
    buckets = params.buckets(8 << 20)
    reducer = Uncompressed(comm, buckets)
    if scheme is not None:
        reducer = scheme.reducer(comm, params, buckets)
    comm.barrier()
    before, counted_before = bytes_sent(), comm.traffic.bytes
    for _ in range(NUM_STEPS):
        params.zero()
        params.grads.normal_()
        params.stats[ROWS] = 32.0
        for work in [reducer.reduce_async_(index) for index in range(len(buckets))]:
            work.wait()
    comm.barrier()
    return bytes_sent() - before, comm.traffic.bytes - counted_before


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_sockets_carry_as_little_as_is_counted(size):
    with RankProcesses("torch", size, timeout_seconds=120) as ranks:
        results = {
            scheme: ranks.run(reduce_a_million, scheme) for scheme in (None, OneBit(), FP16())
        }
    sent = {scheme: sum(bytes for bytes, _ in of) for scheme, of in results.items()}
    counted = {scheme: sum(bytes for _, bytes in of) for scheme, of in results.items()}
    for scheme in results:  # the rest are barriers
        assert sent[scheme] == pytest.approx(counted[scheme], rel=0.05, abs=8_000 * size)
    assert sent[OneBit()] < sent[None] / 25
    assert sent[FP16()] < sent[None] / 1.95
