"""Shared memory between real processes: the contract, the same bits, and peers that are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.comm.base import Communicator, ReduceOp, reduce_in_rank_order
from sparkdml.comm.shared_memory import exchange
from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comm.shared_memory.exchange import CHUNK_BYTES, PARTS_BYTES, Exchange
from sparkdml.comm.shared_memory.hosts import find_host, grouped
from sparkdml.comm.shared_memory.segment import Offer, Segment
from sparkdml.comm.threads import run_threads
from sparkdml.errors import CommunicationError
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.waiting import wait_until

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
        "processes", [("torch", 2), ("torch", 3)], ids=["torch-2", "torch-3"], indirect=True
    )


OPS: tuple[ReduceOp, ...] = ("sum", "min", "max", "product", "mean")


def tensor_of(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def reduced(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """What every rank must get, to the bit; and that is close to what float64 gives."""
    expected = reduce_in_rank_order(inputs, op)
    exact = reduce_in_rank_order([each.double() for each in inputs], op)
    torch.testing.assert_close(expected.double(), exact, rtol=1e-5, atol=1e-5)
    return expected


def reduce_lengths(base: Communicator) -> None:
    """Shorter and longer than a part and a chunk, one after the other, by every op."""
    comm = shared(base)
    part, chunk = PARTS_BYTES // 4, CHUNK_BYTES // 4
    for length in (1, 2, part - 1, part, part + 1, chunk, chunk + 1, 3 * chunk + 7, 5):
        inputs = [tensor_of(rank, length) for rank in range(comm.size)]
        for op in OPS:
            expected = reduced(inputs, op)
            for _ in range(2):
                assert torch.equal(comm.allreduce_(inputs[comm.rank].clone(), op), expected)
        for root in range(comm.size):
            sent = comm.broadcast_(inputs[comm.rank].clone(), root)
            assert torch.equal(sent, inputs[root])


def reduce_again_and_again(base: Communicator, dtype: torch.dtype, op: ReduceOp) -> None:
    """Long tensors that are known beforehand, with other work between the beginning and the end."""
    comm = shared(base)
    lengths = [CHUNK_BYTES // dtype.itemsize * 2 + 7, 3, CHUNK_BYTES // dtype.itemsize + 1]
    tensors = [torch.empty(length, dtype=dtype) for length in lengths]
    starts = [comm.repeated(tensor, op) for tensor in tensors]
    for step in range(3):
        inputs = [
            [(tensor_of(rank + step, length) * 10).to(dtype) for rank in range(comm.size)]
            for length in lengths
        ]
        for tensor, each in zip(tensors, inputs, strict=True):
            tensor.copy_(each[comm.rank])
        works = [start() for start in starts]
        time.sleep(0.005 * (comm.rank == step % comm.size))  # another one is late each time
        ones = comm.allreduce_(torch.ones(5))  # comes after all that was begun
        for work, tensor, each in zip(works, tensors, inputs, strict=True):
            work.wait()
            assert torch.equal(tensor, reduce_in_rank_order(each, op))
        assert ones.tolist() == [comm.size] * 5


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
def test_no_rank_overwrites_what_a_slow_rank_has_not_read(slow_rank: int) -> None:
    with RankProcesses("torch", 2) as two:
        two.run(read_slowly, slow_rank)


# Two ranks go another way than three or more.
@pytest.mark.parametrize(
    "processes", [("torch", 2), ("torch", 4)], ids=["torch-2", "torch-4"], indirect=True
)
class TestLengths:
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the suite's: the processes outlive a test."""

    def test_sums_are_in_rank_order_whatever_the_length(self, processes: RankProcesses) -> None:
        processes.run(reduce_lengths)

    @pytest.mark.parametrize("op", ["sum", "max"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16])
    def test_what_was_begun_is_finished_later(
        self, processes: RankProcesses, dtype: torch.dtype, op: ReduceOp
    ) -> None:
        processes.run(reduce_again_and_again, dtype, op)


class OneProcess(Segment):
    """Memory for ranks that are threads, which have no record locks: those belong to a process."""

    def has_left(self, local_rank: int) -> bool:
        return False


@contextmanager
def memory_in_small_chunks(size: int) -> Iterator[Segment]:
    """Of 16 floats each, which threads meet in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "CHUNK_BYTES", 64)
        patch.setattr(exchange, "PARTS_BYTES", 24)
        memory, _ = OneProcess.create()
        try:
            memory.allocate(Exchange.num_bytes(size))
            memory.map(Exchange.num_bytes(size), 0)
            Exchange.initialise(memory, size)
            yield memory
        finally:
            memory.close()


@settings(max_examples=100)
@given(
    size=st.integers(2, 5),
    calls=st.lists(
        st.tuples(st.integers(1, 90), st.sampled_from(OPS), st.booleans()), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
)
def test_every_chunk_is_that_of_float64_and_the_same_everywhere(size, calls, seed):
    """Some calls are only begun, and finished after all the others."""
    inputs = [
        [tensor_of(seed + size * number + rank, length) for rank in range(size)]
        for number, (length, _, _) in enumerate(calls)
    ]

    def on_rank(base, memory):
        comm = SharedMemoryCommunicator(base, Exchange(memory, base.rank, size, base.check))
        tensors = [each[comm.rank].clone() for each in inputs]
        works = []
        for tensor, (_, op, begins) in zip(tensors, calls, strict=True):
            works.append(comm.allreduce_async_(tensor, op))
            if not begins:
                works[-1].wait()
        for work in works:
            work.wait()
        return tensors

    with memory_in_small_chunks(size) as memory:
        results = run_threads(size, lambda base: on_rank(base, memory))
    for number, (_, op, _) in enumerate(calls):
        expected = reduced(inputs[number], op)
        assert all(torch.equal(tensors[number], expected) for tensors in results)


class TestFourRanks:
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the suite's: the processes outlive a test."""

    def test_waiting_for_a_slow_peer_takes_no_processor(self, four: RankProcesses) -> None:
        assert four.run(sleep_before_an_allreduce)[0] < 0.3

    def test_different_calls_are_told_apart(self, four: RankProcesses) -> None:
        messages = four.run(call_different_things)
        four.stop()  # they no longer agree
        four.start()
        assert "rank 3: sum of 6 torch.float32" in messages[0]


def reduce_for_ever(comm: Communicator) -> None:
    while True:
        comm.allreduce_(torch.ones(100_000))


def say_so_and_reduce_for_ever(base: Communicator, sign: str) -> None:
    comm = shared(base)
    comm.allreduce_(torch.ones(100_000))
    Path(sign, str(comm.rank)).touch()
    reduce_for_ever(comm)


def files_of(process: Path) -> Iterator[str]:
    """What it has open or mapped; nothing where it has ended meanwhile, or isn't ours."""
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                yield os.readlink(descriptor)
        yield from (line.split()[-1] for line in (process / "maps").read_text().splitlines())


def abandoned(paths: set[Path]) -> set[Path]:
    """Files of this user that no living process has open or mapped."""
    in_use = {name for process in Path("/proc").glob("[0-9]*") for name in files_of(process)}
    free = {path for path in paths if str(path) not in in_use}
    return {path for path in free if path.exists() and path.stat().st_uid == os.getuid()}


def test_killed_ranks_leave_nothing_behind(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    before = set(memory.iterdir())
    with RankProcesses("torch", 3) as ranks:
        ranks.begin(say_so_and_reduce_for_ever, str(tmp_path))
        wait_until(lambda: len(os.listdir(tmp_path)) == 3, seconds=30)  # all of them reduce
        for rank in (1, 0, 2):
            ranks.kill(rank)
        # Other programs may make files there at any time, but then they have them open.
        assert not abandoned(set(memory.iterdir()) - before)


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

    def refused(self: Segment, num_bytes: int, local_rank: int) -> None:
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


def keep_it_closed(base: Communicator) -> tuple[int, str]:
    """How many files are open for what is kept, and what a kept call of it says."""
    before = len(os.listdir("/proc/self/fd"))
    comm = SharedMemoryCommunicator.open(base)
    assert comm is not None
    tensor = torch.ones(3)
    begin = comm.repeated(tensor)
    begin().wait()
    comm.broadcast_(torch.ones(PARTS_BYTES))
    unawaited = comm.allreduce_async_(tensor)
    comm.close()
    with pytest.raises(CommunicationError, match="closed"):
        unawaited.wait()
    with pytest.raises(CommunicationError) as caught:
        begin()
    return len(os.listdir("/proc/self/fd")) - before, str(caught.value)


def test_who_keeps_a_closed_one_keeps_no_memory() -> None:
    with RankProcesses("torch", 3) as ranks:
        assert ranks.run(keep_it_closed) == [(0, "this communicator is closed")] * 3


def open_a_segment_that_is_not_meant(base: Communicator) -> tuple[bool, bool]:
    """Whether rank 1 opens what is not meant, and whether rank 0 then still sees its lock.

    As if the offer came from another host, whose process and file have the same numbers.
    """
    host = find_host(base)
    assert host.exchange is not None
    segment = host.exchange._segment
    place = base.broadcast_(torch.tensor([os.getpid(), segment._fd])).tolist()
    is_opened = False
    if base.rank == 1:
        is_opened = Segment.open(Offer(*place, nonce=7)) is not None
    base.barrier()
    holds = not segment.has_left(1 - base.rank)
    base.barrier()
    host.close()
    return is_opened, holds


def test_a_look_at_what_is_not_meant_costs_no_lock() -> None:
    with RankProcesses("torch", 2) as ranks:
        assert ranks.run(open_a_segment_that_is_not_meant) == [(False, True)] * 2


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
