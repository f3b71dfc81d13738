"""What happens to real ranks when one raises, leaves, hangs or is killed; and opening again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparkdml.comm.backends import open_communicator, why_no_horovod
from sparkdml.comm.base import Communicator, World
from sparkdml.comm.environment import temporary_environment
from sparkdml.comm.rendezvous import Rendezvous
from sparkdml.errors import CommunicationError
from sparkdml.testing.rank_processes import RankFailed, RankProcesses
from sparkdml.testing.waiting import wait_until

needs_horovod = pytest.mark.skipif(why_no_horovod() is not None, reason=str(why_no_horovod()))
BACKENDS = ["torch", pytest.param("horovod", marks=needs_horovod)]


@pytest.fixture
def worlds() -> Iterator[RankProcesses]:
    with RankProcesses(None, 3) as ranks:
        yield ranks


def allreduce_for_ever(comm: Communicator) -> None:
    while True:
        comm.allreduce_(torch.ones(1000))


def allreduce_until_it_fails(comm: Communicator, victim: int) -> tuple[float, str]:
    """Seconds from the kill to the error, and its text."""
    for _ in range(5):
        comm.allreduce_(torch.ones(1000))
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        allreduce_for_ever(comm)
    seconds = time.monotonic() - killed
    comm.abort()
    with pytest.raises(CommunicationError, match="closed"):
        comm.allreduce_(torch.ones(1))
    return seconds, str(caught.value)


@pytest.mark.parametrize(
    ("backend", "victim"),
    [
        ("torch", 0),
        pytest.param("horovod", 2, marks=needs_horovod),
        pytest.param("torch", 2, marks=pytest.mark.slow),
        pytest.param("horovod", 0, marks=[needs_horovod, pytest.mark.slow]),
    ],
)
def test_survivors_of_a_killed_rank_raise_within_seconds(backend: str, victim: int) -> None:
    with RankProcesses(backend, 3, patience_seconds=10) as ranks:
        ranks.begin(allreduce_until_it_fails, victim)
        results, errors = ranks.finish([0, 1, 2])
    assert list(errors) == [victim], errors
    assert "ended with -9" in errors[victim]
    for seconds, message in results.values():
        assert seconds < 5
        assert "a rank is probably gone" in message


def raise_on_rank_1(world: World, backend: str) -> str:
    try:
        with open_communicator(backend, world) as comm:
            comm.allreduce_(torch.ones(1))
            if world.rank == 1:
                raise KeyError("the user's own error")
            for _ in range(10_000):
                comm.allreduce_(torch.ones(1))
    except Exception as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_on_one_rank_releases_the_others(worlds: RankProcesses, backend: str) -> None:
    names = worlds.run(raise_on_rank_1, backend)
    assert names == ["CommunicationError", "KeyError", "CommunicationError"]


def open_use_and_close(world: World, backend: str, times: int) -> list[float]:
    totals = []
    for _ in range(times):
        with open_communicator(backend, world) as comm:
            totals.append(comm.allreduce_(torch.tensor(float(world.rank))).item())
            with comm.split(color=world.rank % 2) as group:
                totals.append(group.allreduce_(torch.tensor(1.0)).item())
        comm.close()
    return totals


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_may_open_again_and_again(worlds: RankProcesses, backend: str) -> None:
    expected = [[3.0, 2.0] * 4, [3.0, 1.0] * 4, [3.0, 2.0] * 4]
    assert worlds.run(open_use_and_close, backend, 4) == expected


def fail_then_open_again(world: World, fresh_ports: tuple[int, int], backend: str) -> float:
    raise_on_rank_1(world, backend)
    second = World(
        world.rank,
        world.size,
        world.hosts,
        store_port=fresh_ports[0],
        kv_port=fresh_ports[1],
        interface=world.interface,
    )
    with open_communicator(backend, second) as comm:
        return comm.allreduce_(torch.tensor(1.0)).item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_may_open_again_after_a_failure(worlds: RankProcesses, backend: str) -> None:
    with Rendezvous("127.0.0.1") as fresh:
        ports = (fresh.store_port, fresh.kv_port)
        assert worlds.run(fail_then_open_again, ports, backend) == [3.0, 3.0, 3.0]


def abort_with_work_under_way(comm: Communicator, mark: Path) -> bool:
    """Whether rank 0 came out of it while rank 1 was there and had not come."""
    if comm.rank == 0:
        comm.allreduce_async_(torch.ones(10))
        comm.abort()
        mark.touch()
        return True
    return wait_until(mark.exists)


@pytest.mark.parametrize("backend", BACKENDS)
def test_abort_does_not_wait_for_peers(backend: str, tmp_path: Path) -> None:
    with RankProcesses(backend, 2) as ranks:
        assert ranks.run(abort_with_work_under_way, tmp_path / "aborted") == [True, True]


def wait_for_all(comm: Communicator) -> None:
    comm.barrier()


def wait_for_a_rank_that_hangs(comm: Communicator) -> str:
    if comm.rank == 2:
        time.sleep(2)
        return "hung"
    with pytest.raises(CommunicationError) as caught:
        comm.allreduce_(torch.ones(1))
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_driver_can_release_ranks_that_wait(backend: str) -> None:
    with RankProcesses(backend, 3) as ranks:
        ranks.run(wait_for_all)  # until they have opened it
        ranks.begin(wait_for_a_rank_that_hangs)
        ranks.rendezvous.sound_alarm("rank 2 stopped answering")
        results, errors = ranks.finish([0, 1, 2])
    assert not errors
    reason = "the run failed: rank 2 stopped answering"
    assert results == {0: reason, 1: reason, 2: "hung"}


def open_twice_with_both_settings(world: World) -> None:
    with temporary_environment({"HOROVOD_CYCLE_TIME": "0.5"}):
        for _ in range(2):
            open_communicator("horovod", world).close()


@needs_horovod
def test_settings_that_would_crash_horovod_are_refused(worlds: RankProcesses) -> None:
    with pytest.raises(RankFailed, match=r"SetupError: .*Unset HOROVOD_CYCLE_TIME"):
        worlds.run(open_twice_with_both_settings)


def open_impatiently(world: World, backend: str) -> None:
    if backend == "torch":
        from sparkdml.comm.torch import TorchCommunicator as Opened
    else:
        from sparkdml.comm.horovod import HorovodCommunicator as Opened  # type: ignore[assignment]
    Opened.open(world, arrival_timeout_seconds=0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_ranks_are_named(worlds: RankProcesses, backend: str) -> None:
    with pytest.raises(RankFailed, match=r"CommunicationError: ranks \[0, 2\] did not arrive"):
        worlds.run(open_impatiently, backend, ranks=[1])
