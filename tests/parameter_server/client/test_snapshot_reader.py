"""A snapshot reader sees one consistent model, whatever workers do, and delays no worker."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparkdml.parameter_server.client.snapshot_reader import SnapshotReader
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP
from sparkdml.parameter_server.optimizers import SGD, Add
from sparkdml.parameter_server.partition import Table
from sparkdml.testing.server_cluster import ServerCluster

PART_BYTES = 64  # so that even small tables have many parts, on all servers


def push_on(cluster, worker, start, stop, go_on=lambda clock: None, leave=None, size=200):
    """In its clock k (from 0 on) a worker adds 1 to all of "sums", and k to all of "marks".

    It stays until `leave`.
    """
    with cluster.client(worker) as client:
        client.init("sums", torch.zeros(size), updater=Add())
        client.init("marks", torch.zeros(7, 5), rows=True, updater=Add(), exact=True)
        start.wait(20)
        while client.clock_now < stop:
            go_on(client.clock_now)
            client.push("sums", torch.ones(size))
            client.push("marks", torch.full((7, 5), float(client.clock_now)))
            client.clock()
            client.pull("sums").wait()
        if leave is not None:
            leave.wait(60)


TABLES = [
    Table.of("sums", torch.zeros(200), False, PART_BYTES),
    Table.of("marks", torch.zeros(7, 5), True, PART_BYTES),
]


@pytest.mark.parametrize("consistency", [BSP(), SSP(2), TAP(), ASP(0.0)], ids=str)
def test_a_snapshot_has_every_push_of_its_clocks_in_all_parts_and_no_other(consistency):
    """Snapshots one after the other, while three workers go on as fast as they can."""
    num_workers, clocks = 3, 25
    with (
        ServerCluster(2, num_workers, consistency=consistency, part_bytes=PART_BYTES) as cluster,
        SnapshotReader(cluster.config, cluster.ask) as snapshot_reader,
    ):
        start, leave = threading.Barrier(num_workers), threading.Event()
        threads = [
            threading.Thread(
                target=push_on, args=(cluster, worker, start, clocks), kwargs={"leave": leave}
            )
            for worker in range(num_workers)
        ]
        for thread in threads:
            thread.start()
        seen = []
        while not seen or seen[-1] < clocks:
            snapshot = snapshot_reader.snapshot(TABLES, lambda: True)
            sums, marks = snapshot.tables["sums"], snapshot.tables["marks"]
            assert sums.unique().tolist() == [num_workers * snapshot.clock]
            assert marks.unique().tolist() == [num_workers * sum(range(snapshot.clock))]
            seen.append(snapshot.clock)
        assert seen == sorted(seen)
        leave.set()
        for thread in threads:
            thread.join(20)


@pytest.mark.parametrize("consistency", [SSP(3), TAP()], ids=str)
def test_late_pushes_of_a_slow_worker_are_in_the_snapshot_and_later_ones_of_a_quick_one_are_not(
    consistency,
):
    """The quick one is 2 clocks ahead when the snapshot begins, and 3 before it can end."""
    begun = threading.Event()

    def goes_on():
        nodes = cluster.nodes.values()
        if sum(node.num_copies for node in nodes) == TABLES[0].num_parts:
            begun.set()
        return True

    with (
        ServerCluster(2, 2, consistency=consistency, part_bytes=PART_BYTES) as cluster,
        SnapshotReader(cluster.config, cluster.ask) as snapshot_reader,
        ThreadPoolExecutor(2) as pool,
    ):
        quick, slow = pool.map(cluster.client, range(2))
        for client in (quick, slow):
            client.init("sums", torch.zeros(200), updater=SGD(lr=1.0, momentum=0.5))

        def make(client, clocks):
            for _ in range(clocks):
                client.push("sums", torch.full((200,), -1.0))
                client.clock()

        make(quick, 2)
        asked = pool.submit(snapshot_reader.snapshot, TABLES[:1], goes_on)
        assert begun.wait(20)
        make(quick, 1)
        make(slow, 2)
        snapshot = asked.result(20)
        assert snapshot.clock == 2
        # Four steps by SGD with momentum: 1, then 1.5, 1.75, 1.875 more.
        torch.testing.assert_close(snapshot.tables["sums"], torch.full((200,), 6.125))
        assert quick.pull("sums").wait()[0] > 6.2


def test_of_a_worker_that_has_left_every_push_is_in_the_snapshot():
    """It was ahead; the others are not waited for until they have come as far."""
    with (
        ServerCluster(2, 2, consistency=TAP(), part_bytes=PART_BYTES) as cluster,
        SnapshotReader(cluster.config, cluster.ask) as snapshot_reader,
        ThreadPoolExecutor(2) as pool,
    ):
        quick, slow = pool.map(cluster.client, range(2))
        for client, clocks in ((quick, 5), (slow, 2)):
            client.init("sums", torch.zeros(200), updater=Add())
            for _ in range(clocks):
                client.push("sums", torch.ones(200))
                client.clock()
            client.pull("sums").wait()
        quick.close()
        snapshot = snapshot_reader.snapshot(TABLES[:1], lambda: True)
        assert snapshot.clock == 2
        assert snapshot.tables["sums"].unique().tolist() == [5.0 + 2.0]
        slow.close()


def test_it_waits_for_tables_and_for_servers_and_ends_when_it_is_told_to():
    with ServerCluster(1, 1, part_bytes=PART_BYTES) as cluster:
        looks = iter([True, True, True, False])
        with SnapshotReader(cluster.config, cluster.ask) as snapshot_reader:
            assert snapshot_reader.snapshot(TABLES, lambda: next(looks)) is None
    with SnapshotReader(cluster.config, lambda what, **fields: None) as snapshot_reader:
        looks = iter([True, True, False])
        assert snapshot_reader.snapshot(TABLES, lambda: next(looks)) is None


@pytest.mark.parametrize("consistency", [BSP(), TAP()], ids=str)
def test_a_server_that_is_lost_meanwhile_does_not_make_it_wrong(consistency):
    with (
        ServerCluster(3, 1, consistency=consistency, part_bytes=PART_BYTES) as cluster,
        SnapshotReader(cluster.config, cluster.ask) as snapshot_reader,
    ):
        start, halted, go_on = threading.Barrier(2), threading.Event(), threading.Event()

        def halt(clock):
            if clock == 10:
                halted.set()
                go_on.wait(20)

        worker = threading.Thread(target=push_on, args=(cluster, 0, start, 20, halt))
        worker.start()
        start.wait(20)
        assert halted.wait(20)
        assert snapshot_reader.snapshot(TABLES, lambda: True).clock == 10
        cluster.stop_server(0)
        cluster.membership.lost_server(0)
        snapshot = snapshot_reader.snapshot(TABLES, lambda: True)
        assert snapshot.clock == 10
        assert snapshot.tables["sums"].unique().tolist() == [10.0]
        go_on.set()
        worker.join(20)
