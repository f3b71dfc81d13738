"""Servers and workers on threads, with the real wire: what is pushed is what is pulled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP
from sparkdml.parameter_server.filters import Largest
from sparkdml.parameter_server.optimizers import SGD, Adam
from sparkdml.testing.server_cluster import ServerCluster

Result = TypeVar("Result")
NUMBERS = torch.arange(3000.0)  # some twelve parts of 1,000 bytes


def run_workers(
    cluster: ServerCluster, count: int, function: Callable[[WorkerClient], Result]
) -> list[Result]:
    """`function(client)` for each worker, on threads; an error ends them all."""

    def run(worker: int) -> Result:
        with cluster.client(worker) as client:
            return function(client)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_is_pushed_is_pulled(num_servers: int, encrypted: bool) -> None:
    settings: Any = {"consistency": TAP(), "part_bytes": 1000, "encrypted": encrypted}
    with ServerCluster(num_servers, **settings) as cluster, cluster.client() as client:
        client.init("numbers", NUMBERS)
        client.push("numbers", torch.ones(3000))
        assert torch.equal(client.pull("numbers").wait(), NUMBERS + 1)
        table = torch.randn(100, 3, 4)
        client.init("rows", table, rows=True, updater=SGD(lr=0.5))
        client.push("rows", torch.ones(3, 3, 4), rows=[99, 5, 99])
        table[5] -= 0.5
        table[99] -= 1.0
        torch.testing.assert_close(client.pull("rows").wait(), table)
        wanted = [99, 7, 5, 99]
        torch.testing.assert_close(client.pull("rows", rows=wanted).wait(), table[wanted])
        out = torch.empty(3000)
        assert client.pull("numbers", out=out).wait() is out
        assert client.stats.pushes == 12 + 2


def _train(num_servers: int, rows: bool) -> Tensor:
    """Two workers, five steps; weights differ, and so do the rows."""

    def work(client: WorkerClient) -> Tensor:
        client.init("w", torch.ones(60, 5), rows=rows, updater=SGD(lr=0.1, momentum=0.9))
        for step in range(5):
            client.pull("w").wait()
            gradient, weight = _gradient(client.worker, step)
            if rows:
                touched = torch.arange(client.worker, 60, 2 + step)
                client.push("w", gradient[touched], rows=touched, weight=weight)
            else:
                client.push("w", gradient, weight=weight)
            client.clock()
        return client.pull("w").wait()

    with ServerCluster(num_servers, num_workers=2, part_bytes=200) as cluster:
        first, second = run_workers(cluster, 2, work)
    assert torch.equal(first, second)
    return first


def _gradient(worker: int, step: int) -> tuple[Tensor, float]:
    generator = torch.Generator().manual_seed(10 * worker + step)
    return torch.randn(60, 5, generator=generator), 3.0 + 5 * worker


def test_bsp_equals_synchronous_sgd_to_the_bit() -> None:
    values = torch.nn.Parameter(torch.ones(60, 5))
    optimizer = torch.optim.SGD([values], lr=0.1, momentum=0.9)
    for step in range(5):
        parts = [_gradient(worker, step) for worker in range(2)]
        values.grad = sum(g for g, _ in parts) / sum(w for _, w in parts)  # type: ignore[assignment]
        optimizer.step()
    result = _train(2, rows=False)
    torch.testing.assert_close(result, values.detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(result, _train(3, rows=False))


def test_bsp_weighs_sparse_gradients_by_all_examples() -> None:
    values = torch.ones(60, 5)
    moving = torch.zeros(60, 5)
    for step in range(5):
        total, touched = torch.zeros(60, 5), torch.zeros(60, dtype=torch.bool)
        for worker in range(2):
            rows = torch.arange(worker, 60, 2 + step)
            total[rows] += _gradient(worker, step)[0][rows]
            touched[rows] = True
        moving[touched] = 0.9 * moving[touched] + total[touched] / 11.0
        values[touched] -= 0.1 * moving[touched]
    torch.testing.assert_close(_train(2, rows=True), values)


def test_a_worker_that_dies_does_not_hold_the_others_up() -> None:
    with ServerCluster(2, num_workers=2, part_bytes=1000) as cluster:
        alive, doomed = cluster.client(0), cluster.client(1)
        alive.init("n", torch.zeros(3000))
        doomed.init("n", torch.zeros(3000))
        for client in (alive, doomed):
            client.push("n", torch.ones(3000)).wait()
        alive.clock()
        waiting = alive.pull("n")
        assert not waiting.done  # the other one's clock isn't over
        doomed.abort()
        cluster.membership.lost_worker(1)
        assert waiting.wait(20)[0] == 2  # what it had pushed counts
        alive.close()


def test_a_worker_that_was_started_again_can_push_no_more_as_it_was() -> None:
    with ServerCluster(2, consistency=TAP(), part_bytes=1000) as cluster:
        old = cluster.client()
        old.init("numbers", NUMBERS)
        old.push("numbers", torch.ones(3000), mark=2).wait()
        with cluster.client() as new:
            new.init("numbers", NUMBERS)
            with pytest.raises(CommunicationError):
                old.push("numbers", torch.ones(3000), mark=4).wait()
            new.push("numbers", torch.ones(3000), mark=2)  # which the servers have had
            new.push("numbers", torch.ones(3000), mark=4)
            new.flush()
            assert torch.equal(new.pull("numbers").wait(), NUMBERS + 2)
            assert new.stats.repeated == 12


def test_a_worker_that_comes_late_begins_at_the_others_clock() -> None:
    with ServerCluster(2, num_workers=1) as cluster:
        first = cluster.client(0)
        first.init("n", torch.zeros(3))
        for _ in range(5):
            first.push("n", torch.ones(3))
            first.clock()
        late = cluster.client(1)
        assert late.clock_now == 5
        late.init("n", torch.zeros(3))
        assert late.pull("n").wait()[0] == 5
        late.clock()
        first.clock()
        assert first.pull("n").wait(20)[0] == 5


def test_ssp_bounds_the_lead_and_reads_its_own_writes() -> None:
    lock, clocks, lead = threading.Lock(), [0, 0, 0], []

    def work(client: WorkerClient) -> None:
        client.init("n", torch.zeros(3, 4))
        for step in range(12):
            own = client.pull("n").wait()[client.worker]
            assert own[0] == step, "it must see its own pushes"
            with lock:
                lead.append(clocks[client.worker] - min(clocks))
            update = torch.zeros(3, 4)
            update[client.worker] = 1
            client.push("n", update)
            with lock:
                clocks[client.worker] += 1
            client.clock()
        client.barrier()

    with ServerCluster(2, num_workers=3, consistency=SSP(2)) as cluster:
        run_workers(cluster, 3, work)
    assert max(lead) <= 2


def test_ssp_reads_again_without_the_servers_within_the_bound() -> None:
    with ServerCluster(1, consistency=SSP(2)) as cluster, cluster.client() as client:
        client.init("n", torch.zeros(4))
        client.pull("n").wait()
        for step in range(1, 6):
            client.push("n", torch.ones(4))
            client.clock()
            assert client.pull("n").wait()[0] == step
        assert client.stats.cached_pulls == 4  # the one that was read at clock 0 is too old at 3
        assert client.stats.pulls == 2


def test_asp_holds_back_what_does_not_matter() -> None:
    model = ASP(significance=0.1)
    with ServerCluster(2, consistency=model) as cluster, cluster.client() as client:
        client.init("n", torch.full((4,), 10.0))
        client.pull("n").wait()
        client.push("n", torch.tensor([0.5, 2.0, 0.0, -0.6]))
        assert client.pull("n").wait().tolist() == [10, 12, 10, 10]
        client.push("n", torch.tensor([0.6, 0.1, 0.0, 0.0]))
        values = client.pull("n").wait()
        torch.testing.assert_close(values, torch.tensor([11.1, 12.0, 10.0, 10.0]))


def test_an_exact_table_is_never_filtered() -> None:
    settings: Any = {"consistency": ASP(significance=0.9), "half": True}
    with ServerCluster(2, **settings) as cluster, cluster.client() as client:
        client.init("n", torch.full((4,), 1000.1), exact=True)
        client.pull("n").wait()
        client.push("n", torch.full((4,), 0.5))
        assert torch.equal(client.pull("n").wait(), torch.full((4,), 1000.1) + 0.5)


def test_a_table_that_is_there_is_not_sent_again() -> None:
    with ServerCluster(2, num_workers=2, consistency=TAP(), part_bytes=1000) as cluster:
        first, second = cluster.client(0), cluster.client(1)
        first.init("n", NUMBERS)
        second.init("n", torch.zeros(1).expand(3000))
        assert torch.equal(second.pull("n").wait(), NUMBERS)
        second.init("wide", torch.zeros(1, 1).expand(200, 300), rows=True)
        assert second.pull("wide", rows=[199]).wait().eq(0).all()


def test_a_table_that_is_there_with_another_shape_is_refused() -> None:
    with ServerCluster(2, num_workers=2, consistency=TAP()) as cluster:
        first, second = cluster.client(0), cluster.client(1)
        first.init("n", torch.zeros(30))
        for other in (torch.zeros(31), torch.zeros(30, dtype=torch.float64), torch.zeros(5, 6)):
            with pytest.raises(ParameterError, match="differs"):
                second.init("n", other)


def test_workers_who_all_left_wait_for_each_other_again() -> None:
    with ServerCluster(1, num_workers=2) as cluster:
        for _ in range(2):
            run_workers(cluster, 2, lambda client: client.init("n", torch.zeros(3)))
            assert not cluster.membership.view.started
        alone = cluster.client(0)
        alone.init("n", torch.zeros(3))
        alone.clock()
        waiting = alone.pull("n")
        other = cluster.client(1)
        assert other.clock_now == alone.clock_now - 1
        assert not waiting.done


def test_the_largest_gradients_go_first_and_nothing_is_lost() -> None:
    settings: Any = {"consistency": TAP(), "filter": Largest(0.25)}
    with ServerCluster(1, **settings) as cluster, cluster.client() as client:
        client.init("n", torch.zeros(4))
        client.push("n", torch.tensor([1.0, 4.0, 2.0, 3.0]))
        assert client.pull("n").wait().tolist() == [0, 4, 0, 0]
        for _ in range(3):
            client.push("n", torch.zeros(4))
        assert client.pull("n").wait().tolist() == [1, 4, 2, 3]


def test_half_precision_halves_the_bytes() -> None:
    with ServerCluster(1, consistency=TAP(), half=True) as cluster, cluster.client() as client:
        client.init("n", NUMBERS)
        client.push("n", torch.ones(3000)).wait()
        torch.testing.assert_close(client.pull("n").wait(), NUMBERS + 1, rtol=1e-3, atol=1e-3)
        assert client.stats.bytes_pushed == client.stats.bytes_pulled == 6000


def test_rows_that_were_named_before_are_not_sent_again() -> None:
    with ServerCluster(1, consistency=TAP()) as cluster, cluster.client() as client:
        client.init("t", torch.zeros(500, 2), rows=True)
        rows = torch.arange(0, 500, 2)
        for _ in range(3):
            client.push("t", torch.ones(250, 2), rows=rows).wait()
        others = torch.arange(1, 500, 2)
        client.push("t", torch.ones(250, 2), rows=others).wait()
        client.push("t", torch.ones(250, 2), rows=rows).wait()
        values = client.pull("t").wait()
        assert values[rows].eq(4).all()
        assert values[others].eq(1).all()
        node = cluster.nodes[0]
        assert node.stats.rows_named == 2


def test_a_snapshot_continues_in_another_group_as_if_nothing_had_happened() -> None:
    def step(client: WorkerClient) -> None:
        client.push("w", client.pull("w").wait() * 2, weight=4.0)
        client.push("e", torch.ones(2, 3), rows=[1, 7], weight=2.0)
        client.clock()

    with ServerCluster(2, part_bytes=100) as cluster, cluster.client() as client:
        client.init("w", torch.linspace(1, 2, 77), updater=Adam(lr=0.1))
        client.init("e", torch.ones(9, 3), rows=True, updater=Adam(lr=0.1))
        for _ in range(3):
            step(client)
        saved = client.snapshot()
        for _ in range(2):
            step(client)
        expected = [client.pull(name).wait() for name in ("w", "e")]
    with ServerCluster(3, part_bytes=64) as cluster, cluster.client() as client:
        client.restore(saved)
        for _ in range(2):
            step(client)
        for name, value in zip(("w", "e"), expected, strict=True):
            assert torch.equal(client.pull(name).wait(), value)


def test_a_new_learning_rate_keeps_the_momentum() -> None:
    with ServerCluster(2, consistency=TAP()) as cluster, cluster.client() as client:
        client.init("w", torch.zeros(5), updater=SGD(lr=1.0, momentum=0.5))
        client.push("w", torch.ones(5))
        client.set_optimizer(SGD(lr=0.1, momentum=0.5))
        client.push("w", torch.ones(5))
        torch.testing.assert_close(client.pull("w").wait(), torch.full((5,), -1 - 0.15))


def test_bad_arguments_are_named_before_anything_is_sent() -> None:
    with ServerCluster(1) as cluster, cluster.client() as client:
        client.init("w", torch.zeros(5))
        client.init("t", torch.zeros(5, 2), rows=True)
        for call, parameter in (
            (lambda: client.push("x", torch.zeros(5)), "name"),
            (lambda: client.push("w", torch.zeros(6)), "value"),
            (lambda: client.push("w", torch.zeros(5), weight=float("nan")), "weight"),
            (lambda: client.push("w", torch.zeros(1), rows=[1]), "rows"),
            (lambda: client.push("t", torch.zeros(1, 2), rows=[5]), "rows"),
            (lambda: client.push("t", torch.zeros(2, 2), rows=[1]), "value"),
            (lambda: client.pull("t", rows=[-1]), "rows"),
            (lambda: client.pull("w", out=torch.zeros(4)), "out"),
            (lambda: client.init("b", torch.zeros(5, dtype=torch.bool)), "dtype"),
            (lambda: client.init("v", torch.zeros(5), rows=True), "rows"),
        ):
            with pytest.raises(ParameterError, match=parameter):
                call()


def test_a_client_that_finds_no_servers_says_so() -> None:
    cluster = ServerCluster(1, timeout_seconds=0.3)
    with pytest.raises(CommunicationError, match="timeout_seconds"):
        cluster.client()


def test_after_the_end_nothing_hangs() -> None:
    with ServerCluster(1) as cluster:
        client = cluster.client()
        client.init("w", torch.zeros(5))
        client.close()
        with pytest.raises(CommunicationError, match="closed"):
            client.pull("w").wait(10)


def test_bsp_waits_for_all_workers_that_are_expected() -> None:
    with ServerCluster(1, num_workers=2, consistency=BSP()) as cluster:
        early = cluster.client(0)
        early.init("w", torch.zeros(5))
        early.clock()
        waiting = early.pull("w")
        late = cluster.client(1)
        assert late.clock_now == 0
        assert not waiting.done
        late.clock()
        waiting.wait(20)
