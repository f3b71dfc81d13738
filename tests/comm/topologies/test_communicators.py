"""Topologies as communicators: the contract on threads, hosts that are made up, order and ends."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.comm.base import reduce_in_rank_order
from sparkdml.comm.shared_memory.hosts import Host
from sparkdml.comm.threads import run_threads
from sparkdml.comm.topologies import opening
from sparkdml.comm.topologies.base import THREAD_NAME
from sparkdml.comm.topologies.hierarchical import hierarchical
from sparkdml.comm.topologies.opening import TREE_UP_TO_BYTES, choose, open_topology
from sparkdml.errors import CommunicationError, SetupError
from sparkdml.testing.communicator_contract import CommunicatorContract, OnEveryRank


def on_threads(name, size, function):
    def on_rank(comm):
        with open_topology(name, comm) as opened:
            return function(opened)

    return run_threads(size, on_rank)


# The others differ from the ring in nothing but the function that they call.
@pytest.mark.parametrize(("name", "size"), [("ring", 3), ("ring", 1), ("hierarchical", 3)])
class TestContract(CommunicatorContract):
    @pytest.fixture
    def on_every_rank(self, name: str, size: int) -> OnEveryRank:
        return lambda check: on_threads(name, size, check)


@settings(deadline=None, max_examples=40)
@given(hosts=st.lists(st.integers(0, 3), min_size=1, max_size=9), length=st.integers(0, 40))
def test_hierarchical_sums_for_any_placement(hosts, length):
    inputs = [
        torch.randn(length, generator=torch.Generator().manual_seed(rank))
        for rank in range(len(hosts))
    ]

    def on_rank(comm):
        inside = comm.split(hosts[comm.rank])
        across = comm.split(int(inside.rank > 0))
        tensor = inputs[comm.rank].clone()
        hierarchical(inside, across if inside.rank == 0 else None, tensor, "sum")
        return tensor

    results = run_threads(len(hosts), on_rank)
    expected = sum(each.double() for each in inputs)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.fixture
def two_hosts(monkeypatch):
    """Ranks 0 and 1 on one, rank 2 on another; memory was refused."""
    monkeypatch.setattr(opening, "find_host", lambda comm: Host((0, 0, 2)[: comm.size], None))


def test_auto_takes_what_is_there(two_hosts):
    assert on_threads("auto", 3, lambda comm: comm.topology) == ["hierarchical"] * 3
    # Two ranks of one host without memory in common: as two hosts.
    limit = TREE_UP_TO_BYTES[2]
    assert on_threads("auto", 2, lambda comm: comm.topology) == [f"tree up to {limit:,} bytes"] * 2
    assert on_threads("auto", 1, lambda comm: comm.topology) == ["native"]


def test_threads_are_left_to_themselves():
    assert on_threads("auto", 2, lambda comm: comm.topology) == ["native"] * 2


def test_two_hosts_agree(two_hosts):
    inputs = [torch.randn(20) for _ in range(3)]
    results = on_threads("hierarchical", 3, lambda comm: comm.allreduce_(inputs[comm.rank].clone()))
    for result in results:
        torch.testing.assert_close(result, reduce_in_rank_order(inputs, "sum"))


def test_shared_memory_says_why_not(two_hosts):
    with pytest.raises(SetupError, match=r"2 hosts.*'hierarchical'"):
        on_threads("shared-memory", 3, lambda comm: None)


@pytest.mark.parametrize(
    ("num_bytes", "size", "num_hosts", "expected"),
    [
        (4_000, 1, 1, "native"),
        (4_000, 2, 1, "shared-memory"),
        (40_000_000, 8, 1, "shared-memory"),
        (4_000, 8, 2, "hierarchical"),
        (4_000, 4, 4, "tree"),
        (40_000_000, 4, 4, "native"),
        (4_000, 100, 100, "native"),
    ],
)
def test_the_choice(num_bytes, size, num_hosts, expected):
    assert choose(num_bytes, size, num_hosts) == expected


def test_auto_leaves_long_messages_to_the_backend(monkeypatch):
    monkeypatch.setattr(opening, "tree_limit", lambda size: 40)
    monkeypatch.setattr(opening, "find_host", lambda comm: Host((0, 1, 2), None))

    def messages_for(comm):
        counts = []
        for length in (10, 11):
            before = comm.traffic.messages
            comm.allreduce_(torch.ones(length))
            counts.append(comm.traffic.messages - before)
        return counts

    # Rank 1 is a leaf of the tree; the backend counts as a ring does.
    assert on_threads("auto", 3, messages_for)[1] == [1, 4]


def test_a_thread_continues_what_was_begun():
    """It is done although no rank waits."""

    def begin(comm):
        tensor = torch.ones(5)
        work = comm.allreduce_async_(tensor)
        done = threading.Event()
        comm._order.begin(done.set)
        assert done.wait(30)
        assert tensor.tolist() == [2.0] * 5
        work.wait()

    on_threads("ring", 2, begin)
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]


def test_a_rank_that_fails_releases_the_others():
    def fail_on_rank_1(comm):
        if comm.rank == 1:
            raise KeyError("the user's own")
        with pytest.raises(CommunicationError):
            comm.allreduce_(torch.ones(5))
        works = [comm.allreduce_async_(torch.ones(5)) for _ in range(2)]
        for work in works:
            with pytest.raises(CommunicationError, match="failed"):
                work.wait()
        return "released"

    with pytest.raises(KeyError):
        on_threads("ring", 3, fail_on_rank_1)
    assert THREAD_NAME not in [thread.name for thread in threading.enumerate()]
