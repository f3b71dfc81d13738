"""Collectives whose lengths the caller knows: the same result in half the rounds, or an error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkdml.comm.backends import why_no_horovod
from sparkdml.comm.base import Communicator
from sparkdml.comm.driver_exchange import DriverCommunicator, DriverExchange
from sparkdml.comm.single import SingleCommunicator
from sparkdml.comm.threads import run_threads
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.observe.timeline.communicator import TracedCommunicator
from sparkdml.observe.timeline.recorder import SpanRecorder
from sparkdml.testing.communicator_checks import equal, of_rank
from sparkdml.testing.rank_processes import RankProcesses

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def piece(source: int, to: int, turn: int, dtype: torch.dtype) -> Tensor:
    length = (source + 2 * to + turn) % 3
    return torch.full((length, 2), (10 * source + to) % 7).to(dtype)


def the_same_arrives(comm: Communicator) -> None:
    ranks = range(comm.size)
    for turn in range(3):
        for dtype in DTYPES:
            lengths = [(rank * 3 + turn) % 4 for rank in ranks]
            mine = torch.full((lengths[comm.rank], 2), comm.rank).to(dtype)
            for rank, tensor in enumerate(comm.allgather(mine, lengths)):
                equal(tensor, torch.full((lengths[rank], 2), rank).to(dtype))
            lengths = [len(piece(rank, comm.rank, turn, dtype)) for rank in ranks]
            received = comm.alltoall([piece(comm.rank, to, turn, dtype) for to in ranks], lengths)
            for source, tensor in enumerate(received):
                equal(tensor, piece(source, comm.rank, turn, dtype))
    nothing = torch.empty(0, 3)
    for tensor in comm.allgather(nothing, [0] * comm.size):
        equal(tensor, nothing)
    for tensor in comm.alltoall([nothing] * comm.size, [0] * comm.size):
        equal(tensor, nothing)


def as_much_is_counted(comm: Communicator) -> None:
    """What travels ahead was never counted, and content is counted in any case."""

    def count(lengths: list[int] | None) -> tuple[int, int]:
        before = comm.traffic.bytes, comm.traffic.messages
        comm.allgather(of_rank(comm.rank, 5), lengths)
        comm.alltoall([of_rank(comm.rank, 5)] * comm.size, lengths)
        return comm.traffic.bytes - before[0], comm.traffic.messages - before[1]

    others = comm.size - 1
    assert count([5] * comm.size) == count(None) == (2 * others * 20, 2 * others)


def wrong_lengths_are_refused_before_anything_is_sent(comm: Communicator) -> None:
    # On every rank alike, so that all still agree on what was called.
    two, before = torch.ones(2), comm.traffic.bytes
    for lengths in ([2] * (comm.size + 1), [], [-1] * comm.size):
        with pytest.raises(
            ParameterError, match=f"lengths must be one length for each of the {comm.size} "
        ):
            comm.allgather(two, lengths)
    wrong = rf"lengths\[{comm.rank}\] must be 2, the first dimension .* but got 3"
    with pytest.raises(ParameterError, match=wrong):
        comm.allgather(two, [3] * comm.size)
    with pytest.raises(ParameterError, match=wrong):
        comm.alltoall([two] * comm.size, [3] * comm.size)
    with pytest.raises(ParameterError, match="without dimensions"):
        comm.allgather(torch.tensor(1.0), [1] * comm.size)
    if comm.size > 1:
        uneven = [torch.ones(2, 1 + rank) for rank in range(comm.size)]
        with pytest.raises(ParameterError, match="equal on all ranks"):
            comm.alltoall(uneven, [2] * comm.size)
    assert comm.traffic.bytes == before
    equal(comm.allgather(two, [2] * comm.size)[-1], two)


CHECKS = [the_same_arrives, as_much_is_counted, wrong_lengths_are_refused_before_anything_is_sent]


def check_all(comm: Communicator) -> None:
    for check in CHECKS:
        check(comm)


def traced(comm: Communicator) -> TracedCommunicator:
    def ignore(*args: Any, **fields: Any) -> None:
        """A link without a peer."""

    spans = SpanRecorder(comm.size, "h", ignore, ignore, time.time)
    spans._closing.set()  # nothing is sent
    spans._thread.join()
    return TracedCommunicator(comm, spans)


def through_the_driver(size: int, function: Any) -> list[Any]:
    table, over = DriverExchange(), threading.Event()

    def ask(**fields: Any) -> list[str] | None:
        if over.is_set():
            raise CommunicationError("the run is over")
        return table.contribute(**fields)

    def on_rank(rank: int) -> Any:
        try:
            return function(DriverCommunicator(rank, size, ask, wait_seconds=30))
        except BaseException:
            over.set()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on_rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads_take_them(size: int) -> None:
    run_threads(size, check_all, timeout_seconds=20)


def test_one_rank_takes_them() -> None:
    check_all(SingleCommunicator())


def test_communicators_that_pass_on_pass_them_on() -> None:
    run_threads(3, lambda comm: check_all(traced(comm)), timeout_seconds=20)

    def on_ring(comm: Communicator) -> None:
        with open_topology("ring", comm) as opened:
            check_all(opened)

    run_threads(3, on_ring, timeout_seconds=20)


def test_the_driver_communicator_takes_them() -> None:
    through_the_driver(2, check_all)


def counted(comm: Any, name: str, calls: list[str]) -> None:
    """Note each call of a method of this communicator."""
    method = getattr(comm, name)

    def call(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    setattr(comm, name, call)


def nothing_travels_ahead(comm: Any) -> None:
    """Of any communicator that is composed: how often it moves words."""
    moved: list[str] = []
    for name in ("_allgather_words", "_exchange_words"):
        counted(comm, name, moved)
    for lengths, rounds in (([2] * comm.size, 1), (None, 2)):
        comm.allgather(torch.ones(2), lengths)
        comm.alltoall([torch.ones(2)] * comm.size, lengths)
        assert moved == ["_allgather_words"] * rounds + ["_exchange_words"] * rounds
        moved.clear()
    del comm._allgather_words, comm._exchange_words


def test_no_sizes_are_exchanged_ahead() -> None:
    through_the_driver(2, nothing_travels_ahead)


needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param("torch", 2, marks=pytest.mark.slow),
        ("torch", 3),
        pytest.param("horovod", 2, marks=needs_horovod),
        pytest.param("horovod", 3, marks=[needs_horovod, pytest.mark.slow]),
    ],
)
def test_processes_take_them(backend: str, size: int) -> None:
    with RankProcesses(backend, size) as ranks:
        ranks.run(check_all)
        ranks.run(nothing_travels_ahead)


def test_threads_notice_ranks_that_do_not_agree() -> None:
    def one_knows(comm: Communicator) -> None:
        comm.allgather(torch.ones(2), [2, 2] if comm.rank else None)

    def they_know_otherwise(comm: Communicator) -> None:
        comm.allgather(torch.ones(2 + comm.rank), [[2, 2], [2, 3]][comm.rank])

    for disagree in (one_knows, they_know_otherwise):
        with pytest.raises(CommunicationError, match="different collectives"):
            run_threads(2, disagree, timeout_seconds=20)

    def another_sends_more(comm: Communicator) -> None:
        lengths = [2, 2] if comm.rank == 0 else [1, 2]
        comm.alltoall([torch.ones(2), torch.ones(2)], lengths)

    with pytest.raises(ParameterError, match="lengths must be those of the received tensors"):
        run_threads(2, another_sends_more, timeout_seconds=20)


def what_arrives_is_counted(comm: Any) -> None:
    """For backends that tell how much came: here one that brings a word too few."""
    gather = comm._allgather_words
    comm._allgather_words = lambda words, counts: gather(words, counts)[:-1]
    with pytest.raises(ParameterError, match="expected 4 words, received 3"):
        comm.allgather(torch.ones(2), [2, 2])
    del comm._allgather_words


def test_too_few_words_are_an_error() -> None:
    through_the_driver(2, what_arrives_is_counted)
