"""The communicator through the driver: the contract of communicators, and restarted ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparkdml.comm import driver_exchange
from sparkdml.comm.driver_exchange import DriverCommunicator, DriverExchange
from sparkdml.errors import CommunicationError
from sparkdml.testing.communicator_contract import CommunicatorContract


def run(size, fn, table=None):
    """Run `fn` on every rank; a failing rank ends the others' waits, as the end of a run does."""
    table, over = table or DriverExchange(), threading.Event()

    def ask(**fields):
        if over.is_set():
            raise CommunicationError("the run is over")
        return table.contribute(**fields)

    def rank_of(rank):
        try:
            return fn(DriverCommunicator(rank, size, ask, wait_seconds=30))
        except BaseException:
            over.set()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


class TestDriverCommunicator(CommunicatorContract):
    @pytest.fixture(params=[2])
    def on_every_rank(self, request):
        return lambda check: run(request.param, check)


def test_a_restarted_rank_receives_the_recorded_result_and_changes_nothing():
    table = DriverExchange()

    def program(comm):
        comm.begin("the end of epoch 1")
        return comm.allreduce_(torch.tensor([comm.rank + 1.0])).item()

    assert run(3, program, table) == [6.0] * 3
    again = DriverCommunicator(1, 3, table.contribute)
    again.begin("the end of epoch 1")
    assert again.allreduce_(torch.tensor([100.0])).item() == 6.0


def test_old_phases_are_forgotten():
    table = DriverExchange()

    def program(comm):
        comm.barrier()
        for epoch in range(20):
            comm.begin(f"epoch {epoch}")
            comm.barrier()

    run(2, program, table)
    phases = {phase for phase, _, _ in table._contents}
    assert phases == {"first", "epoch 16", "epoch 17", "epoch 18", "epoch 19"}


def test_large_contributions_travel_in_pieces(monkeypatch):
    monkeypatch.setattr(driver_exchange, "MAX_CONTENT_BYTES", 64)
    found = run(2, lambda comm: comm.allgather(torch.arange(100.0 * comm.rank)))
    assert [[len(part) for part in parts] for parts in found] == [[0, 100]] * 2
    assert torch.equal(found[0][1], torch.arange(100.0))


def test_a_wait_for_a_lost_rank_times_out():
    alone = DriverCommunicator(0, 2, DriverExchange().contribute, wait_seconds=0.05)
    with pytest.raises(CommunicationError, match="not all 2 ranks reached collective 1"):
        alone.barrier()
