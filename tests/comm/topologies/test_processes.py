"""Topologies between real processes, on both backends, with hosts that are made up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from sparkdml.comm.backends import why_no_horovod
from sparkdml.comm.base import Communicator, reduce_in_rank_order
from sparkdml.comm.shared_memory import hosts
from sparkdml.comm.shared_memory.segment import Offer, Segment
from sparkdml.comm.topologies.base import THREAD_NAME
from sparkdml.comm.topologies.opening import open_topology
from sparkdml.errors import CommunicationError
from sparkdml.testing.rank_processes import RankProcesses

needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))
BACKENDS = ["torch", pytest.param("horovod", marks=needs_horovod)]


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In place of the suite's: the processes outlive a test."""


@pytest.fixture(scope="module", params=BACKENDS)
def four(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(request.param, 4) as ranks:
        yield ranks


@contextmanager
def two_hosts(comm: Communicator) -> Iterator[None]:
    """Ranks 0 and 1 can't open what ranks 2 and 3 offer, as on another host."""
    offers: list[Offer] = []
    exchange, opens = hosts._exchange_offers, Segment.open

    def remembered(comm: Communicator, offer: Offer) -> list[Offer]:
        offers[:] = exchange(comm, offer)
        return offers

    def open_nearby(offer: Offer) -> Segment | None:
        return opens(offer) if offers.index(offer) // 2 == comm.rank // 2 else None

    hosts._exchange_offers = remembered
    Segment.open = staticmethod(open_nearby)  # type: ignore[assignment]
    try:
        yield
    finally:
        hosts._exchange_offers, Segment.open = exchange, opens  # type: ignore[method-assign]


def reduce_by(comm: Communicator, name: str, apart: bool) -> tuple[str, list[float]]:
    sums = []
    with two_hosts(comm) if apart else nullcontext():
        reducer = open_topology(name, comm)
    with reducer as opened:
        for length in (3, 1000, 300_000):  # the last one in several segments
            inputs = [
                torch.randn(length, generator=torch.Generator().manual_seed(rank))
                for rank in range(comm.size)
            ]
            mine = inputs[comm.rank].clone()
            works = [opened.allreduce_async_(each) for each in (mine, torch.ones(5))]
            for work in works:
                work.wait()
            expected = reduce_in_rank_order(inputs, "sum")
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
            sums.append(mine.double().sum().item())
    comm.barrier()  # the base is as it was
    return reducer.topology, sums


@pytest.mark.parametrize(
    "name", ["ring", "tree", "double-tree", "halving-doubling", "shared-memory", "auto"]
)
def test_every_topology_between_processes(four: RankProcesses, name: str) -> None:
    results = four.run(reduce_by, name, False)
    assert all(result == results[0] for result in results)
    assert results[0][0] == ("shared-memory" if name == "auto" else name)


@pytest.mark.parametrize("name", ["hierarchical", "auto"])
def test_memory_inside_hosts_and_messages_between(four: RankProcesses, name: str) -> None:
    results = four.run(reduce_by, name, True)
    assert all(result == results[0] for result in results)
    assert results[0][0] == "hierarchical"


def wait_for_all(comm: Communicator) -> None:
    comm.barrier()


def wait_for_a_rank_that_hangs(comm: Communicator, name: str, is_begun: bool) -> tuple[str, float]:
    """What a rank that waits is told, and how long it then takes to leave."""
    opened = open_topology(name, comm)
    opened.allreduce_(torch.ones(1000))
    if comm.rank == 2:
        time.sleep(600)

    def reduce() -> None:
        if is_begun:  # by the thread
            opened.allreduce_async_(torch.ones(1000)).wait()
        else:
            opened.allreduce_(torch.ones(1000))

    with pytest.raises(CommunicationError) as caught:
        reduce()
    raised = time.monotonic()
    with pytest.raises(CommunicationError, match="an earlier allreduce failed"):
        opened.allreduce_(torch.ones(1000))
    opened.abort()
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    return str(caught.value), time.monotonic() - raised


@pytest.mark.parametrize(("name", "is_begun"), [("ring", False), ("tree", False), ("ring", True)])
def test_the_driver_can_release_ranks_that_wait(name: str, is_begun: bool) -> None:
    """Though gloo waits for a message without looking up."""
    with RankProcesses("torch", 3) as ranks:
        ranks.run(wait_for_all)  # until they have opened it
        ranks.begin(wait_for_a_rank_that_hangs, name, is_begun)
        time.sleep(1)  # until they wait
        ranks.rendezvous.sound_alarm("rank 2 stopped answering")
        results, errors = ranks.finish([0, 1])
    assert not errors
    reasons = {reason for reason, _ in results.values()}
    assert reasons == {"the run failed: rank 2 stopped answering"}
    assert max(seconds for _, seconds in results.values()) < 5


def abort_while_the_thread_waits(comm: Communicator, name: str) -> float:
    opened = open_topology(name, comm)
    opened.allreduce_(torch.ones(1000))
    if comm.rank == 2:
        time.sleep(600)
    opened.allreduce_async_(torch.ones(1000))
    time.sleep(0.1)  # until the thread waits
    begun = time.monotonic()
    opened.abort()
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    return time.monotonic() - begun


def test_abort_releases_the_own_thread() -> None:
    with RankProcesses("torch", 3) as ranks:
        ranks.begin(abort_while_the_thread_waits, "ring")
        results, errors = ranks.finish([0, 1])
    assert not errors
    assert max(results.values()) < 5


def reduce_until_a_peer_dies(comm: Communicator, name: str) -> float:
    opened = open_topology(name, comm)
    opened.allreduce_(torch.ones(1000))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    killed = time.monotonic()
    try:
        while True:
            opened.allreduce_(torch.ones(1000))
    except CommunicationError:
        opened.abort()
        comm.abort()  # as a worker does, whose neighbours may wait for it
        return time.monotonic() - killed


def test_survivors_of_a_killed_rank_raise() -> None:
    with RankProcesses("torch", 3, patience_seconds=10) as ranks:
        ranks.begin(reduce_until_a_peer_dies, "ring")
        results, errors = ranks.finish([0, 1, 2])
    assert list(errors) == [1], errors
    assert max(results.values()) < 8


def bytes_over_two_hosts(comm: Communicator) -> int:
    tensor = torch.ones(3000)
    with two_hosts(comm), open_topology("hierarchical", comm) as wire:
        wire.traffic.take()
        wire.allreduce_(tensor)
        sent, _ = wire.traffic.take()
    return sent // tensor.nbytes


def test_what_two_levels_send(four: RankProcesses) -> None:
    """All write S into memory; a leader S more for its host, and a ring's S to the other leader."""
    assert four.run(bytes_over_two_hosts) == [3, 1, 3, 1]
