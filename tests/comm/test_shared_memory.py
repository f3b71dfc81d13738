"""Shared memory between real processes: the contract, the same bits, and peers that are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from sparkdml.comm.base import Communicator
from sparkdml.comm.reductions import reduce_in_rank_order
from sparkdml.comm.shared_memory import exchange
from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comm.shared_memory.exchange import CHUNK_BYTES, PARTS_BYTES
from sparkdml.comm.shared_memory.hosts import grouped
from sparkdml.comm.threads import run_threads
from sparkdml.errors import CommunicationError
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank
from sparkdml.testing.rank_processes import RankProcesses

_opened: dict[int, SharedMemoryCommunicator] = {}  # in a rank's process: once for many checks


def shared(base: Communicator) -> SharedMemoryCommunicator:
    if id(base) not in _opened:
        opened = SharedMemoryCommunicator.open(base)
        assert opened is not None
        _opened[id(base)] = opened
    return _opened[id(base)]


def run_check(base: Communicator, name: str) -> None:
    import_module("sparkdml.testing.communicator_contract")  # fills CHECKS
    from sparkdml.testing.communicator_checks import CHECKS

    CHECKS[name](shared(base))


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(*request.param) as ranks:
        yield ranks


class TestContract(CommunicatorContract):
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the suite's: the processes outlive a test."""

    @pytest.fixture
    def on_every_rank(self, processes: RankProcesses) -> OnEveryRank:
        return lambda check: processes.run(run_check, check.__name__)

    pytestmark = pytest.mark.parametrize(
        "processes", [("torch", 3)], ids=["torch-3"], indirect=True
    )


def tensor_of(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def reduce_lengths(base: Communicator) -> None:
    """Shorter and longer than a part and a chunk, one after the other, by every op."""
    comm = shared(base)
    part, chunk = PARTS_BYTES // 4, CHUNK_BYTES // 4
    for length in (1, 2, part - 1, part, part + 1, chunk, chunk + 1, 3 * chunk + 7, 5):
        inputs = [tensor_of(rank, length) for rank in range(comm.size)]
        for op in ("sum", "min", "product", "mean"):
            expected = reduce_in_rank_order(inputs, op)
            for _ in range(2):
                assert torch.equal(comm.allreduce_(inputs[comm.rank].clone(), op), expected)
        for root in range(comm.size):
            sent = comm.broadcast_(inputs[comm.rank].clone(), root)
            assert torch.equal(sent, inputs[root])


def read_slowly(base: Communicator, slow_rank: int) -> None:
    """One rank is late in reading what the other has brought, which runs ahead as far as it may."""
    comm, chunk, count = shared(base), CHUNK_BYTES // 4, 9
    combine = exchange._COMBINE["sum"]

    def add_late(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 if comm.rank == slow_rank else 0.0)
        return combine(*tensors, out=out)

    exchange._COMBINE["sum"] = add_late
    try:
        numbers = torch.arange(count).repeat_interleave(chunk).float()  # another one a chunk
        for factor in (1, 2):
            summed = comm.allreduce_(numbers * factor)
            assert torch.equal(summed, 2 * factor * numbers)
    finally:
        exchange._COMBINE["sum"] = combine


def report_memory(base: Communicator) -> tuple[int, int]:
    shared(base)
    return os.getpid(), os.getuid()


def sleep_before_an_allreduce(base: Communicator) -> float:
    """Processor seconds that rank 0 spends while it waits a second for the others."""
    comm = shared(base)
    comm.allreduce_(torch.ones(10))
    if comm.rank:
        time.sleep(1.0)
    begun = time.process_time()
    comm.allreduce_(torch.ones(10))
    return time.process_time() - begun


def call_different_things(base: Communicator) -> str:
    comm = shared(base)
    with pytest.raises(CommunicationError) as caught:
        comm.allreduce_(torch.ones(3 + comm.rank))
    with pytest.raises(CommunicationError, match="failed"):
        comm.allreduce_(torch.ones(3))
    return str(caught.value)


@pytest.fixture(scope="class")
def four() -> Iterator[RankProcesses]:
    with RankProcesses("torch", 4) as ranks:
        yield ranks


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_nobody_overwrites_what_a_slow_rank_has_not_read(slow_rank: int) -> None:
    with RankProcesses("torch", 2) as two:
        two.run(read_slowly, slow_rank)


class TestFourRanks:
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the suite's: the processes outlive a test."""

    def test_sums_are_in_rank_order_whatever_the_length(self, four: RankProcesses) -> None:
        four.run(reduce_lengths)

    def test_waiting_for_a_slow_peer_takes_no_processor(self, four: RankProcesses) -> None:
        assert four.run(sleep_before_an_allreduce)[0] < 0.3

    def test_it_has_no_name_that_could_be_left_behind(self, four: RankProcesses) -> None:
        four.run(report_memory)
        assert not list(Path("/dev/shm").glob("*sparkdml*"))

    def test_different_calls_are_told_apart(self, four: RankProcesses) -> None:
        messages = four.run(call_different_things)
        four.stop()  # they no longer agree
        four.start()
        assert "rank 3: sum of 6 torch.float32" in messages[0]


def reduce_for_ever(comm: Communicator) -> None:
    while True:
        comm.allreduce_(torch.ones(100_000))


def reduce_until_a_peer_dies(base: Communicator, victim: int) -> tuple[float, str]:
    comm = shared(base)
    for _ in range(5):
        comm.allreduce_(torch.ones(100_000))
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        reduce_for_ever(comm)
    seconds = time.monotonic() - killed
    comm.abort()
    with pytest.raises(CommunicationError, match="closed"):
        comm.allreduce_(torch.ones(1))
    return seconds, str(caught.value)


def test_survivors_of_a_killed_rank_raise_within_seconds() -> None:
    with RankProcesses("torch", 3, patience_seconds=10) as ranks:
        ranks.begin(reduce_until_a_peer_dies, 1)
        results, errors = ranks.finish([0, 1, 2])
    assert list(errors) == [1], errors
    for seconds, message in results.values():
        assert seconds < 5
        assert "gone" in message


def wait_for_one_that_hangs(base: Communicator) -> str:
    comm = shared(base)
    if comm.rank == 1:
        return "hangs"
    with pytest.raises(CommunicationError) as caught:
        comm.allreduce_(torch.ones(1))
    return str(caught.value)


def open_it(base: Communicator) -> None:
    shared(base)


def test_the_driver_can_release_ranks_that_wait() -> None:
    with RankProcesses("torch", 2) as ranks:
        ranks.run(open_it)
        ranks.begin(wait_for_one_that_hangs)
        ranks.rendezvous.sound_alarm("rank 1 stopped answering")
        results, errors = ranks.finish([0, 1])
    assert not errors
    assert results[0] == "the run failed: rank 1 stopped answering"


def refuse_memory(base: Communicator, rank: int) -> bool:
    """One rank may not map: as under a limit on its address space."""
    from sparkdml.comm.shared_memory.segment import Segment

    def refused(self: Segment, num_bytes: int, seat: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    mapping = Segment.map
    if base.rank == rank:
        Segment.map = refused  # type: ignore[method-assign]
    try:
        descriptors = os.listdir("/proc/self/fd")
        opened = SharedMemoryCommunicator.open(base)
        assert os.listdir("/proc/self/fd") == descriptors
    finally:
        Segment.map = mapping  # type: ignore[method-assign]
    return opened is None


def test_without_memory_on_one_rank_all_do_without() -> None:
    with RankProcesses("torch", 3) as ranks:
        for rank in (0, 2):
            assert ranks.run(refuse_memory, rank) == [True] * 3


def test_threads_of_one_process_do_without() -> None:
    assert run_threads(3, SharedMemoryCommunicator.open) == [None] * 3


def test_who_meets_whom() -> None:
    pids = [10, 11, 12, 13]
    assert grouped([0, 0, 2, 2], pids) == (0, 0, 2, 2)
    # Rank 3 could reach rank 1, who follows rank 0, whom rank 3 can't reach.
    assert grouped([0, 0, 0, 1], pids) == (0, 0, 0, 3)
    # Two hosts may use the same pid; two ranks of one process share a host with others.
    assert grouped([0, 0, 2, 2], [10, 11, 10, 11]) == (0, 0, 2, 2)
    assert grouped([0, 0, 2, 2], [10, 10, 12, 13]) == (0, 1, 2, 2)
