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
from torch import nn

import sparkdml as dml
from sparkdml.comm.threads import run_threads
from sparkdml.comparison.advice import Advice
from sparkdml.comparison.advise import Found, Probe, combine
from sparkdml.comparison.costs import Measured, Network
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.testing.digits import digits, digits_plan
from sparkdml.testing.threads import ThreadContext

CLUSTER = Measured(
    rows=640_000,
    batch_size=64,
    model_bytes=4_000_000,
    max_workers=8,
    step_alone=0.010,
    concurrent_steps=(0.010,) * 8,
    hand_over=6.4,
    network=Network(latency=20e-6, seconds_per_byte=1e-10),
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
    assert "one worker takes 2 s" in repr(advice)


def test_processors_that_are_shared_bring_nothing():
    advice = Advice(replace(CLUSTER, concurrent_steps=(0.085,) * 8), epochs=5)
    assert advice.workers == 1
    assert "workers on the same host compete for its cores" in repr(advice)
    assert "Strategy" not in repr(advice)  # there is nothing to choose


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


def test_the_verdict_is_that_of_the_strategy_which_is_advised():
    advice = advice_by(Network(20e-6, 1e-8))  # 70 ms to agree on 10 ms of work
    assert CLUSTER.epoch(1) == pytest.approx(100.0)
    assert advice.measured.speedup(8) < 1
    assert (advice.workers, advice.is_needed) == (8, True)
    assert repr(advice).splitlines()[-2:] == [
        "Distribution helps: numWorkers=8 with LocalSGD(steps=128) reduces 5 epochs to 1.1 min. "
        "With AllReduce() they would take 8.36 min. Synchronizing less often may change the "
        "result; check with dml.compare.",
        "Strategy: dml.LocalSGD(steps=128).",
    ]


def test_workers_meet_once_an_epoch_at_least():
    advice = advice_by(Network(20e-6, 1e-8), rows=64 * 8 * 20)
    assert advice.strategy == "LocalSGD(steps=16)"
    few = advice_by(Network(20e-6, 1e-8), rows=64)
    assert few.strategy == "LocalSGD(steps=2)"
    assert "an epoch is a single step" in repr(few)


@pytest.mark.parametrize(
    ("steps", "balanced", "pays"),
    [
        ((0.010,) * 7 + (0.040,), 8 / 725, 8),
        ((0.010, 0.029), 2 / (100 + 1 / 0.029), 2),  # of two, which have no median to stand out of
    ],
)
def test_a_slow_worker_calls_for_balance(steps, balanced, pays):
    measured = replace(CLUSTER, concurrent_steps=steps, max_workers=len(steps))
    assert measured.step(len(steps)) == pytest.approx(
        max(steps)
    )  # who agrees in every step waits for it
    assert measured.balanced == pytest.approx(balanced)
    advice = Advice(measured, epochs=5)
    assert (advice.strategy, advice.workers) == ("AdaptiveBalance()", pays)
    assert f"{max(steps) / 0.010:.1f} times as long" in repr(advice)
    assert f"numWorkers={pays} with AdaptiveBalance()" in repr(advice)


def test_small_differences_are_no_reason_to_move_rows():
    measured = replace(CLUSTER, concurrent_steps=(0.010, 0.014), max_workers=2)
    assert Advice(measured, epochs=5).strategy == "AllReduce()"


def test_one_slot_is_said_to_be_one():
    alone = replace(CLUSTER, max_workers=1, network=Network(0.0, 0.0))
    assert "one free slot" in repr(Advice(alone, epochs=1))


def test_every_strategy_that_is_advised_is_there():
    networks = (Network(20e-6, rate) for rate in (1e-8, 1e-9, 1e-10))
    for network in (*networks, Network(500e-6, 1e-11)):
        written = advice_by(network).strategy
        assert isinstance(eval(f"dml.{written}", {"dml": dml}), dml.Strategy)
    assert isinstance(dml.AdaptiveBalance(), dml.Strategy)


def test_ranks_are_put_together():
    found = combine(
        [
            Found(60, 1.0, 0.6, 0.5, 0.1, 0.3, 60, "tree"),
            Found(40, 1.5, 0.8, None, 0.1, 0.4, 60, "tree"),
            Found(0, 1.2, None, None, 0.1, 0.2, 60, "tree"),
        ],
        seconds=4.0,
        batch_size=10,
    )
    assert (found.rows, found.max_workers, found.hand_over) == (100, 3, 2.5)
    assert (found.step_alone, found.concurrent_steps, found.slowest) == (0.5, (0.6, 0.8), 0.8)
    assert found.communication(3) == pytest.approx(0.4)
    assert found.topology == "tree"


# -- a probe in a worker --------------------------------------------------------------------------


class ProbedContext(ThreadContext):
    """Has `num_batches` in each pass that is read, by its number; then none."""

    num_batches = (1000,) * 9
    num_rows = 20

    def feed(self, batch_size, epoch=0, shuffle=True, position=None):
        assert epoch <= len(self.num_batches), "it would never end"
        return islice(super().read(BatchRequest(batch_size)), self.num_batches[epoch - 1])


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


def test_the_quickest_steps_once_more_alone():
    alone = [found.alone for found in probe()]
    assert len([one for one in alone if one is not None]) == 1
    assert [found.alone for found in probe(Fruitless)] == [None, None]


def test_a_step_of_ones_own_is_in_a_training_run():
    seen = []

    def step(modules, batch, ctx):
        assert ctx.training
        seen.append((ctx.rank, ctx.size, ctx.host))  # the worker's own, beyond a step's
        return nn.functional.cross_entropy(modules(batch["x"]), batch["y"])

    plan = replace(digits_plan(), loss=None, metrics={}, step=step)
    probe = Probe(plan, 5, steps=1, topology="auto")
    run_threads(2, lambda comm: probe(ProbedContext(comm, digits(20))))
    assert set(seen) == {(0, 2, "here"), (1, 2, "here")}


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
