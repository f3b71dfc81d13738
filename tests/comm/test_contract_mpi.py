"""The contract over MPI, where mpi4py and Open MPI are installed; its ranks are real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sparkdml.comm.mpi_names import why_no_mpi
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank
from sparkdml.testing.rank_processes import RankProcesses

pytestmark = pytest.mark.skipif(why_no_mpi() is not None, reason=str(why_no_mpi()))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the suite's: the processes, and the stores that they meet in, outlive a test."""


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    os.environ.update(allowed)  # containers often have no other user
    with RankProcesses("mpi", request.param) as ranks:
        yield ranks
    for name in allowed:
        os.environ.pop(name, None)


@pytest.mark.parametrize("processes", [2, 3], indirect=True)
class TestMPI(CommunicatorContract):
    @pytest.fixture
    def on_every_rank(self, processes: RankProcesses) -> OnEveryRank:
        return processes.run
