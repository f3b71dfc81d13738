"""Ranks of a host merged: the same sums, and one worker's messages."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.comm.threads import run_threads
from sparkdml.parameter_server.client.base import Client
from sparkdml.parameter_server.client.merging import MergingClient
from sparkdml.parameter_server.optimizers import SGD
from sparkdml.testing.server_cluster import ServerCluster

STEPS = 4


def _work(client: Client, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    client.init("w", torch.ones(50), updater=SGD(lr=0.1, momentum=0.9))
    client.init("e", torch.ones(20, 3), rows=True, updater=SGD(lr=0.1))
    for step in range(STEPS):
        values = client.pull("w").wait()
        client.push("w", values * (rank + 1), weight=2.0 + rank)
        rows = [rank, rank + step, 7]
        client.push("e", torch.full((3, 3), 1.0 + rank), rows=rows, weight=2.0 + rank)
        client.clock()
    own = client.pull("e", rows=[rank, 7, rank]).wait()
    return client.pull("w").wait(), client.pull("e").wait(), own


def test_a_host_of_three_equals_three_workers() -> None:
    with ServerCluster(2, num_workers=1, part_bytes=100) as cluster:

        def merged(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
            client = cluster.client() if comm.rank == 0 else None
            with MergingClient(comm, client) as both:
                result = _work(both, comm.rank)
                assert both.clock_now == STEPS
            if client is not None:
                assert client.stats.pulls <= (STEPS + 1) * 2 + 7 + 7
            return result

        together = run_threads(3, merged)
    with ServerCluster(2, num_workers=3, part_bytes=100) as cluster:

        def apart(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
            with cluster.client(comm.rank) as client:
                return _work(client, comm.rank)

        single = run_threads(3, apart)
    for rank in range(3):
        for one, other in zip(together[rank], single[rank], strict=True):
            torch.testing.assert_close(one, other)
