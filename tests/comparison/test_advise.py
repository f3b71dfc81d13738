"""Advice: the arithmetic on made-up clusters, and a measurement on Spark."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_comparison import make_estimator, make_rows

import sparkdml as dml
from sparkdml.comm.threads import run_threads
from sparkdml.comparison.advice import Advice
from sparkdml.comparison.advise import Found, Probe, combine
from sparkdml.comparison.costs import Measured, Network
from sparkdml.testing.digits import digits, digits_plan
from sparkdml.testing.threads import ThreadContext

CLUSTER = Measured(
    rows=640_000,
    batch_size=64,
    model_bytes=4_000_000,
    max_workers=8,
    step_alone=0.010,
    step_together=0.010,
    slowest_together=0.011,
    read_rate=100_000.0,
    network=Network(latency=20e-6, seconds_a_byte=1e-10),
)


def advice_by(network, **changes):
    return Advice(replace(CLUSTER, network=network, **changes), epochs=5)


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(2, 64),
    latency=st.floats(1e-6, 1e-2),
    rate=st.floats(1e-12, 1e-6),
    num_bytes=st.integers(1_000, 10**9),
)
def test_the_network_is_found_again_from_two_measurements(size, latency, rate, num_bytes):
    network = Network(latency, rate)
    small, large = network.allreduce(size, 0), network.allreduce(size, num_bytes)
    found = Network.fit(size, small, large, num_bytes)
    assert found.allreduce(size, num_bytes) == pytest.approx(large)
    assert found.latency == pytest.approx(latency)


def test_a_ring_costs_nothing_alone_and_little_more_among_many():
    network = Network(0.0, 1e-9)
    assert network.allreduce(1, 1e6) == 0
    assert network.allreduce(2, 1e6) == pytest.approx(1e-3)
    assert network.allreduce(1000, 1e6) == pytest.approx(2e-3, rel=1e-2)
    assert Network.fit(1, 1.0, 2.0, 100) == Network(0.0, 0.0)


def test_cheap_communication_pays_for_all_workers():
    advice = Advice(CLUSTER, epochs=5)
    assert CLUSTER.epoch(1) == pytest.approx(100.0)
    assert CLUSTER.speedup(8) == pytest.approx(8 / (1 + 0.1 * (0.28 + 0.7)), rel=1e-3)
    assert (advice.workers, advice.strategy, advice.is_needed) == (8, "AllReduce()", True)
    assert "numWorkers=8" in repr(advice)
    assert "<li>" in advice._repr_html_()


def test_a_short_training_needs_no_second_worker():
    advice = Advice(replace(CLUSTER, rows=6_400), epochs=2)
    assert not advice.is_needed
    assert "not needed: one worker is done in 2 s" in repr(advice)


def test_processors_that_are_shared_bring_nothing():
    advice = Advice(replace(CLUSTER, step_together=0.085, slowest_together=0.085), epochs=5)
    assert advice.workers == 1
    assert "take each other's processors" in repr(advice)


@pytest.mark.parametrize(
    ("network", "strategy"),
    [
        (Network(20e-6, 1e-10), "AllReduce()"),
        (Network(20e-6, 1e-9), "AllReduce(compression=dml.FP16())"),  # 7 of 17 ms
        (Network(500e-6, 1e-11), "LocalSGD(steps=8)"),  # 7 ms, of messages
        (Network(20e-6, 1e-8), "LocalSGD(steps=128)"),  # 70 ms for 10 ms of work
    ],
)
def test_the_strategy_follows_from_what_communication_costs(network, strategy):
    assert advice_by(network).strategy == strategy


def test_bytes_in_shared_memory_are_not_worth_compressing():
    by_wire, in_memory = (
        advice_by(Network(20e-6, 1e-9), topology=name) for name in ("native", "shared-memory")
    )
    assert by_wire.strategy == "AllReduce(compression=dml.FP16())"
    assert in_memory.strategy == "LocalSGD(steps=8)"


def test_a_slow_worker_calls_for_balance():
    advice = Advice(replace(CLUSTER, slowest_together=0.04), epochs=5)
    assert advice.strategy == "AdaptiveBalance()"
    assert "4.0 times as long" in repr(advice)


def test_one_slot_is_said_to_be_one():
    alone = replace(CLUSTER, max_workers=1, network=Network(0.0, 0.0))
    assert "one slot" in repr(Advice(alone, epochs=1))


def test_every_strategy_that_is_advised_is_there():
    networks = (Network(20e-6, rate) for rate in (1e-8, 1e-9, 1e-10))
    for network in (*networks, Network(500e-6, 1e-11)):
        written = advice_by(network).strategy
        assert isinstance(eval(f"dml.{written}", {"dml": dml}), dml.Strategy)
    assert isinstance(dml.AdaptiveBalance(), dml.Strategy)


def test_ranks_are_put_together():
    alone = [Found(100, 2.0, 0.5, 0.0, 0.0, 60)]
    together = [
        Found(60, 1.0, 0.6, 0.1, 0.3, 60, "tree"),
        Found(40, 0.5, 0.8, 0.1, 0.4, 60, "tree"),
        Found(0, 0.1, None, 0.1, 0.2, 60, "tree"),
    ]
    found = combine(alone, together, batch_size=10)
    assert (found.rows, found.max_workers, found.read_rate) == (100, 3, 100.0)
    assert (found.step_alone, found.step_together, found.slowest_together) == (0.5, 0.7, 0.8)
    assert found.communication(3) == pytest.approx(0.4)
    assert found.topology == "tree"


# -- a probe in a worker --------------------------------------------------------------------------


class ProbedContext(ThreadContext):
    """Has `num_batches` in each pass that is read, by its number; then none."""

    num_batches = (1000,) * 9
    num_rows = 20

    def feed(self, batch_size, epoch=0, shuffle=True, position=None):
        assert epoch <= len(self.num_batches), "it would go on for ever"
        return islice(super().feed(batch_size), self.num_batches[epoch - 1])


class Fruitless(ProbedContext):
    num_batches = (0,)


class DrawnOnce(ProbedContext):
    num_batches = (1, 0)


def probe(kind=ProbedContext, topology="auto"):
    probe = Probe(digits_plan(), 5, steps=3, topology=topology)
    return run_threads(2, lambda comm: probe(kind(comm, digits(20))))


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", "native"), ("ring", "ring"), ("native", "native")]
)
def test_what_is_timed_is_what_allreduce_would_use(asked, used):
    for found in probe(topology=asked):
        assert found.topology == used
        assert found.large > 0


def test_a_rank_without_a_batch_has_no_step():
    assert [found.step for found in probe(Fruitless)] == [None, None]
    assert all(found.step > 0 for found in probe(DrawnOnce))


def test_times_on_a_gpu_are_those_of_work_that_is_done(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpu = torch.device("cuda:0")
    comm = SimpleNamespace(repeated=lambda tensor: lambda: SimpleNamespace(wait=lambda: None))
    Probe(digits_plan(), 5, steps=2, topology="auto")._time(comm, SimpleNamespace(device=gpu))
    assert waited == [gpu] * 5


# -- on Spark -------------------------------------------------------------------------------------


@pytest.mark.spark
def test_measuring_on_spark(spark):
    df = make_rows(spark)
    advice = dml.advise(make_estimator(), df, steps=3)
    measured = advice.measured
    assert (measured.rows, measured.max_workers, measured.batch_size) == (160, 2, 8)
    assert measured.model_bytes == 15 * 4
    assert 0 < measured.step_alone < 10
    assert 0 < measured.network.latency < 10
    assert not advice.is_needed  # 40 steps of microseconds
    assert measured.topology == "shared-memory"  # as AllReduce() has it on one host
    assert "(shared-memory)" in repr(advice)
    with pytest.raises(dml.ParameterError, match="steps"):
        dml.advise(make_estimator(), df, steps=0)
    with pytest.raises(dml.ParameterError, match="max_workers"):
        dml.advise(make_estimator(), df, max_workers=0)


@pytest.mark.spark
def test_a_step_has_the_rows_that_are_accumulated_and_the_topology_that_is_asked_for(spark):
    estimator = make_estimator(gradientAccumulation=3, strategy=dml.AllReduce(topology="native"))
    measured = dml.advise(estimator, make_rows(spark), steps=1).measured
    assert measured.batch_size == 24
    assert measured.epoch(1) == pytest.approx(7 * measured.step_alone)  # of 160 rows
    assert measured.topology == "native"


@pytest.mark.spark
def test_without_a_batch_there_is_nothing_to_advise(spark):
    df = make_rows(spark)
    with pytest.raises(dml.DataError, match=r"none of 2 workers has a batch.*150 rows"):
        dml.advise(make_estimator(dropLast=True, batchSize=150), df, steps=1)
    for empty in (df.filter("label > 9"), df.limit(0)):
        with pytest.raises(dml.DataError, match="no rows"):
            dml.advise(make_estimator(), empty, steps=1)
