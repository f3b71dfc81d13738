"""kill -9 of servers that are processes of their own: what was acknowledged is there, once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.consistency import BSP, TAP
from sparkdml.parameter_server.optimizers import SGD
from sparkdml.testing.server_processes import ServerProcesses

ELEMENTS = 4000
PARTS = 16
WORKERS = 2


def test_killed_servers_lose_no_acknowledged_push_and_apply_none_twice() -> None:
    """One is killed, restarts and catches up; then the one that has the other copy is killed."""
    acknowledged = [0] * WORKERS
    enough = threading.Event()

    with ServerProcesses(
        2, num_workers=WORKERS, consistency=TAP(), part_bytes=1000, lost_after_seconds=1.5
    ) as group:

        def work(client: WorkerClient) -> int:
            client.init("count", torch.zeros(ELEMENTS))
            while not enough.is_set():
                tickets = [client.push("count", torch.ones(ELEMENTS)) for _ in range(3)]
                for ticket in tickets:
                    ticket.wait(60)
                    acknowledged[client.worker] += 1
            client.barrier()
            return client.stats.resent

        def wait_for_pushes(count: int) -> None:
            reached = sum(acknowledged) + count
            while sum(acknowledged) < reached:
                assert not any(future.done() for future in futures), "a worker ended early"
                enough.wait(0.01)

        clients = [group.client(worker) for worker in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(work, client) for client in clients]
            for server_id in range(2):
                wait_for_pushes(20)
                group.kill(server_id)
                wait_for_pushes(10)  # the successor serves
                generation = group.membership.view.generation
                group.start_server(server_id)
                while server_id not in group.membership.view.servers:
                    assert not any(future.done() for future in futures), "a worker ended early"
                    enough.wait(0.01)
                assert group.membership.view.generation > generation
            wait_for_pushes(20)
            enough.set()
            resent = sum(future.result(60) for future in futures)

        values = clients[0].pull("count").wait(30)
        assert torch.equal(values, torch.full((ELEMENTS,), float(sum(acknowledged))))
        assert sum(client.stats.pushes for client in clients) == PARTS * sum(acknowledged)
        assert resent > 0


def _train(kill_at: int | None) -> Tensor:
    with ServerProcesses(
        2, num_workers=WORKERS, consistency=BSP(), part_bytes=1000, lost_after_seconds=1.5
    ) as group:

        def work(client: WorkerClient) -> Tensor:
            client.init("w", torch.ones(ELEMENTS), updater=SGD(lr=0.1, momentum=0.9))
            for step in range(12):
                values = client.pull("w").wait(60)
                noise = torch.randn(
                    ELEMENTS, generator=torch.Generator().manual_seed(100 * client.worker + step)
                )
                client.push("w", values + noise, weight=2.0 + client.worker)
                if step == kill_at and client.worker == 0:
                    group.kill(1)  # with this push under way
                client.clock()
            return client.pull("w").wait(60)

        clients = [group.client(worker) for worker in range(WORKERS)]
        with ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(work, clients))
    assert torch.equal(*results)
    return results[0]


def test_a_bsp_run_with_a_killed_server_has_the_bits_of_one_without() -> None:
    assert torch.equal(_train(kill_at=5), _train(kill_at=None))
