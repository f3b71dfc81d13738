"""The contract over MPI, where mpi4py and Open MPI are installed; its ranks are real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from sparkdml.comm.base import Communicator
from sparkdml.comm.mpi_names import why_no_mpi, why_no_name_server
from sparkdml.errors import CommunicationError
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank
from sparkdml.testing.rank_processes import RankProcesses

REASON = why_no_mpi() or why_no_name_server()
pytestmark = [
    pytest.mark.slow,  # `make test-slow` installs Open MPI where it can
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the suite's: the processes, and the stores that they meet in, outlive a test."""


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses("mpi", request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("processes", [2, 3], indirect=True)
class TestMPI(CommunicatorContract):
    @pytest.fixture
    def on_every_rank(self, processes: RankProcesses) -> OnEveryRank:
        return processes.run


@pytest.mark.parametrize("processes", [3], indirect=True)
def test_groups_may_have_any_color(processes: RankProcesses) -> None:
    assert processes.run(size_of_its_group) == [2, 1, 2]


def size_of_its_group(comm: Communicator) -> int:
    with comm.split(-7 if comm.rank != 1 else 0) as group:
        return group.size


def allreduce_for_ever(comm: Communicator) -> None:
    while True:
        comm.allreduce_(torch.ones(1000))


def seconds_until_it_fails(comm: Communicator, victim: int, is_killed: bool) -> float | None:
    comm.allreduce_(torch.ones(1000))
    if comm.rank == victim and is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == victim:
        comm.abort()
        return None
    began = time.monotonic()
    with pytest.raises(CommunicationError):
        allreduce_for_ever(comm)
    return time.monotonic() - began


def test_a_rank_that_aborts_releases_the_others() -> None:
    with RankProcesses("mpi", 3, patience_seconds=10) as ranks:
        first, nothing, last = ranks.run(seconds_until_it_fails, 1, False)
    assert nothing is None
    assert max(first, last) < 10


def test_the_drivers_alarm_releases_those_who_wait_for_the_dead() -> None:
    with RankProcesses("mpi", 3, patience_seconds=10) as ranks:
        ranks.begin(seconds_until_it_fails, 2, True)
        _, died = ranks.finish([2])
        ranks.rendezvous.sound_alarm("rank 2 was lost")
        results, errors = ranks.finish([0, 1])
    assert "ended with -9" in died[2]
    assert not errors
    assert sorted(results) == [0, 1]
