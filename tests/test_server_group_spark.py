"""A server group of real Spark tasks, which outlives the fits that use it."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.parameter_server.server_task import host_servers

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def rows(spark):
    return spark.createDataFrame(
        [([i / 50 - 1, (i % 7) / 7], float(i % 2)) for i in range(100)],
        "features array<float>, label float",
    ).cache()


def fit(rows, lr, callbacks=(), **settings):
    return dml.TorchEstimator(
        model=partial(nn.Linear, 2, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=lr),
        strategy=dml.ParameterServer(**settings),
        batchSize=10,
        epochs=2,
        numWorkers=1,
        callbacks=list(callbacks),
        seed=3,
        verbose=0,
    ).fit(rows)


def assert_alike(models, expected):
    for one, other in zip(models, expected, strict=True):
        for mine, its in zip(one.module.parameters(), other.module.parameters(), strict=True):
            assert torch.equal(mine, its)


def test_two_fits_and_a_store_use_one_group_at_once(spark, rows):
    rates = (0.1, 0.02)
    with dml.ServerGroup(1, spark) as group, ThreadPoolExecutor(2) as pool:
        with group.store() as store:
            store.init("sums", torch.zeros(4))
            at_once = list(pool.map(partial(fit, rows, servers=group), rates))
            store.push("sums", torch.ones(4)).wait()
            assert store.pull("sums").tolist() == [1.0] * 4
        with pytest.raises(dml.NotEnoughSlots, match="1 standing server"):
            dml.run(len, num_workers=4, spark=spark, slot_timeout=0)
    assert_alike(at_once[:1], [fit(rows, rates[0], num_servers=1)])
    assert not [t.name for t in threading.enumerate() if t.name == "sparkdml-server-group"]


def count(ctx, store):
    store.init("seen", torch.zeros(3))
    store.push("seen", torch.full((3,), ctx.rank + 1.0))
    store.barrier()
    return store.pull("seen").tolist(), store.num_workers


def test_a_function_of_ones_own_uses_a_group(spark):
    with dml.ServerGroup(1, spark) as group:
        results = dml.run(dml.WithStore(count, servers=group), num_workers=2, spark=spark)
    assert results == [([3.0] * 3, 2)] * 2


def test_too_few_slots_for_a_group(spark):
    with pytest.raises(dml.NotEnoughSlots, match="5"), dml.ServerGroup(5, spark, slot_timeout=0):
        pass


class Touches(dml.Callback):
    """Leaves a file after its fifth step."""

    def __init__(self, path):
        self.path = path

    def on_step_end(self, training):
        if training.step == 5:
            self.path.touch()


@pytest.mark.slow
def test_a_killed_server_of_a_group_harms_none_of_its_fits(spark, rows, tmp_path, monkeypatch):
    doom, killed = tmp_path / "doom", tmp_path / "killed"

    def mortal(ctx):
        def die():
            while not doom.exists():
                time.sleep(0.001)
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        if ctx.rank == 1 and not ctx.attempt:
            threading.Thread(target=die, daemon=True).start()
        return host_servers(ctx)

    rates = (0.1, 0.02)
    monkeypatch.setattr("sparkdml.server_group.host_servers", mortal)
    with dml.ServerGroup(2, spark) as group, ThreadPoolExecutor(2) as pool:
        fits = list(pool.map(partial(fit, rows, callbacks=[Touches(doom)], servers=group), rates))
    assert killed.exists()
    assert_alike(fits, [fit(rows, rate, num_servers=1) for rate in rates])
