"""A store in `dml.run`, served by the workers themselves."""

import threading

import numpy as np
import pytest
import torch

import sparkdml as dml
from sparkdml.parameter_server.consistency import BSP
from sparkdml.parameter_server.kvstore.serving import WithStore

pytestmark = pytest.mark.spark


def count(ctx, store):
    store.init("seen", torch.zeros(3))
    store.push("seen", torch.full((3,), ctx.rank + 1.0))
    store.barrier()
    return store.pull("seen").tolist(), store.rank, store.num_workers


def test_workers_share_what_they_push(spark):
    def counted_then_left(ctx):
        result = shared(ctx)
        left = [t.name for t in threading.enumerate() if t.name.startswith("sparkdml-server")]
        return result, left

    shared = WithStore(count, num_servers=2, encrypted=True)
    counted_then_left.driver_service = shared.driver_service
    results = dml.run(counted_then_left, num_workers=3, spark=spark)
    assert results == [(([6.0] * 3, rank, 3), []) for rank in range(3)]


def test_rows_of_a_data_frame_become_counts(spark):
    def tally(ctx, store):
        table = dml.SparseTable(store, "counts", 10)
        for batch in ctx.feed(16):
            keys = batch["id"].numpy() % 10
            table.add(keys, np.ones((len(keys), 1)))
            store.clock()
        store.barrier()
        return table.get(np.arange(10))[:, 0].tolist()

    results = dml.run(WithStore(tally), data=spark.range(95), num_workers=2)
    assert results == [[10.0] * 5 + [9.0] * 5] * 2


def test_workers_of_a_host_push_as_one(spark):
    def work(ctx, store):
        result = count(ctx, store)
        table = dml.MatrixTable(store, "rows", 10, 1)
        table.add(np.array([ctx.rank, 9]), np.ones((2, 1)))
        pushes = store.client.stats.pushes  # at the host's first worker, of all three
        return result, table.get(np.array([9, 1, ctx.rank]))[:, 0].tolist(), pushes

    results = dml.run(WithStore(work, merge_hosts=True), num_workers=3, spark=spark)
    assert [result for result, _, _ in results] == [([6.0] * 3, rank, 3) for rank in range(3)]
    assert [rows for _, rows, _ in results] == [[3.0, 1.0, 1.0]] * 3
    assert [pushes for _, _, pushes in results] == [2, 0, 0]


def test_a_worker_that_raises_ends_the_run_with_its_error(spark):
    def fail(ctx, store):
        store.init("a", torch.zeros(1))
        if ctx.rank == 1:
            raise KeyError("mine")
        store.barrier()
        store.barrier()

    with pytest.raises(dml.WorkerError, match="mine") as caught:
        dml.run(WithStore(fail, consistency=BSP()), num_workers=2, spark=spark)
    assert caught.value.rank == 1


def test_bad_arguments(spark):
    with pytest.raises(dml.ParameterError, match="fn"):
        WithStore("count")
    with pytest.raises(dml.ParameterError, match="num_servers"):
        WithStore(count, num_servers=0)
    with pytest.raises(dml.ParameterError, match=r"num_servers must be at most num_workers \(2\)"):
        dml.run(WithStore(count, num_servers=3), num_workers=2, spark=spark)
