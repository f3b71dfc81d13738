"""Messages that get lost on the way, in either direction: found by counting, and sent again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import BSP, TAP, Consistency
from sparkdml.parameter_server.optimizers import Add
from sparkdml.parameter_server.wire import sockets
from sparkdml.parameter_server.wire.frames import Kind, Message, decode
from sparkdml.parameter_server.wire.seal import BadFrame
from sparkdml.testing.server_cluster import ServerCluster

STEPS = 12


class Lossy:
    """Drops every n-th message of the chosen kinds, wherever it comes from."""

    def __init__(self, every: int, kinds: Sequence[Kind]) -> None:
        self._every, self._kinds, self._count = every, kinds, itertools.count(1)
        self.num_lost = 0

    def __call__(self, *arguments: Any) -> Message:
        message = decode(*arguments)
        if message.kind in self._kinds and next(self._count) % self._every == 0:
            self.num_lost += 1
            raise BadFrame("lost on the way")
        return message


@pytest.mark.parametrize("model", [TAP(), BSP()], ids=["TAP", "BSP"])
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([Kind.PUSH, Kind.PULL, Kind.INIT], id="requests"),
        pytest.param([Kind.ANSWER], id="answers"),
        pytest.param([Kind.REPLICATE, Kind.INSTALL], id="between servers"),
    ],
)
def test_every_push_is_applied_once_whatever_is_lost(
    monkeypatch: pytest.MonkeyPatch, kinds: list[Kind], model: Consistency
) -> None:
    lossy = Lossy(5, kinds)
    monkeypatch.setattr(sockets, "decode", lossy)
    monkeypatch.setattr("sparkdml.parameter_server.client.sender.SERVER_PING_SECONDS", 0.02)
    monkeypatch.setattr("sparkdml.parameter_server.server.replicator.REPLICA_RESEND_SECONDS", 0.05)

    def work(client: WorkerClient) -> torch.Tensor:
        client.init("n", torch.zeros(600), updater=Add())
        tickets = []
        for step in range(STEPS):
            if step % 3 == 0:
                seen = client.pull("n").wait(30)
                assert seen.eq(step).all(), "it must see its own pushes"
            tickets.append(client.push("n", torch.ones(600)))
            client.clock()
        for ticket in tickets:
            ticket.wait(30)
        return client.pull("n").wait(30)

    with ServerCluster(2, consistency=model, part_bytes=1000) as cluster:
        with cluster.client() as client:
            assert work(client).eq(STEPS).all()
            assert client.stats.pushes == 3 * STEPS
        assert sum(node.stats.pushes for node in cluster.nodes.values()) >= 3 * STEPS
    assert lossy.num_lost > 3
