"""The communicator by way of the driver: the contract of all of them, and ranks that come back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparkdml.comm import meetings
from sparkdml.comm.meetings import MeetingCommunicator, Meetings
from sparkdml.errors import CommunicationError
from sparkdml.testing.communicator_contract import CommunicatorContract


def run(size, fn, table=None):
    """A failing rank takes the others' answers away, as the end of a run does."""
    table, over = table or Meetings(), threading.Event()

    def ask(**fields):
        if over.is_set():
            raise CommunicationError("the run is over")
        return table.come(**fields)

    def rank_of(rank):
        try:
            return fn(MeetingCommunicator(rank, size, ask, wait_seconds=30))
        except BaseException:
            over.set()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))


class TestMeetingCommunicator(CommunicatorContract):
    @pytest.fixture(params=[2])
    def on_every_rank(self, request):
        return lambda check: run(request.param, check)


def test_who_comes_back_hears_the_same_and_changes_nothing():
    table = Meetings()

    def program(comm):
        comm.begin("the end of epoch 1")
        return comm.allreduce_(torch.tensor([comm.rank + 1.0])).item()

    assert run(3, program, table) == [6.0] * 3
    again = MeetingCommunicator(1, 3, table.come)
    again.begin("the end of epoch 1")
    assert again.allreduce_(torch.tensor([100.0])).item() == 6.0


def test_old_chapters_are_forgotten():
    table = Meetings()

    def program(comm):
        comm.barrier()
        for epoch in range(20):
            comm.begin(f"epoch {epoch}")
            comm.barrier()

    run(2, program, table)
    chapters = {chapter for chapter, _, _ in table._words}
    assert chapters == {"first", "epoch 16", "epoch 17", "epoch 18", "epoch 19"}


def test_what_is_large_travels_in_pieces(monkeypatch):
    monkeypatch.setattr(meetings, "MAX_WORDS_BYTES", 64)
    found = run(2, lambda comm: comm.allgather(torch.arange(100.0 * comm.rank)))
    assert [[len(part) for part in parts] for parts in found] == [[0, 100]] * 2
    assert torch.equal(found[0][1], torch.arange(100.0))


def test_nobody_waits_for_ever():
    alone = MeetingCommunicator(0, 2, Meetings().come, wait_seconds=0.05)
    with pytest.raises(CommunicationError, match="not all of 2 ranks have come to meeting 1"):
        alone.barrier()
