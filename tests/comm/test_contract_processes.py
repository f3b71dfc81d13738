"""The contract over real processes; they are started once for each backend and size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparkdml.comm.backends import why_no_horovod
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank
from sparkdml.testing.rank_processes import RankProcesses

needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the suite's: the processes, and the stores that they meet in, outlive a test.

    What this module leaves behind is noticed by the next one.
    """


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param((backend, size), id=f"{backend}-{size}", marks=marks)
        for backend, size, marks in (
            ("torch", 1, ()),
            ("torch", 2, pytest.mark.slow),
            ("torch", 3, ()),
            ("horovod", 1, [needs_horovod, pytest.mark.slow]),
            ("horovod", 2, needs_horovod),
            ("horovod", 3, needs_horovod),
        )
    ],
    indirect=True,
)
class TestProcesses(CommunicatorContract):
    @pytest.fixture
    def on_every_rank(self, processes: RankProcesses) -> OnEveryRank:
        return processes.run
