"""Comparing strategies: the arithmetic, the table, and a comparison on Spark."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_comparison import make_estimator, make_rows

import sparkdml as dml
from sparkdml.comparison.compare import SINGLE, Tally, compare
from sparkdml.comparison.result import Comparison, Outcome, distance, on_frontier
from sparkdml.training.totals import NUM_FIXED_STATS

costs = st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(costs)
def test_every_dominated_point_is_dominated_by_one_on_the_frontier(points):
    stays = on_frontier(points)
    assert any(stays)
    for mine, is_kept in zip(points, stays, strict=True):
        better = [
            other
            for other, kept in zip(points, stays, strict=True)
            if kept and other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
        ]
        assert is_kept == (not better)


def test_who_has_no_numbers_is_not_on_the_frontier():
    assert on_frontier([(1.0, 1.0, math.nan), (1.0, 2.0, 3.0)]) == [False, True]


def test_the_distance_is_relative_and_of_all_weights():
    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]]), "n": torch.tensor(7)}
    other = {"a": torch.tensor([3.0, 3.0]), "b": torch.tensor([[0.0]]), "n": torch.tensor(8)}
    assert distance(one, one) == 0
    assert distance(other, one) == pytest.approx(5 / 5)
    assert distance({"a": torch.tensor([2.0])}, {"a": torch.zeros(1)}) == 2.0


def test_the_tally_is_of_a_worker():
    tally = Tally()
    tally.handle(-1, {"kind": "submission", "workers": 2})
    seconds = {"data": 1.0, "compute": 2.0, "communication": 0.5, "other": 9.0}
    for rank in (0, 1, 1):
        tally.handle(rank, {"kind": "rank", "seconds": seconds, "bytes": 100, "messages": 4})
    tally.handle(0, {"kind": "epoch", "row": {}})
    assert tally.means() == {
        "compute_seconds": 4.5,
        "communication_seconds": 0.75,
        "sent_bytes": 150,
        "messages": 6,
    }


def test_what_servers_send_is_shared_out():
    tally = Tally()
    tally.handle(-1, {"kind": "submission", "workers": 2})
    told = {"bytes_pushed": 1, "pushes": 1, "bytes_pulled": 30, "pulls": 3}
    for rank in (0, 1):  # pushes are in the workers' own traffic
        tally.handle(rank, {"kind": "client", **told})
    assert (tally.means()["sent_bytes"], tally.means()["messages"]) == (30, 3)
    tally.handle(2, {"kind": "communicator", "bytes": 10, "messages": 2})
    assert (tally.means()["sent_bytes"], tally.means()["messages"]) == (35, 4)


@pytest.mark.spark
def test_what_a_communicator_sends_is_counted(spark):
    """2 workers give S into memory; their communicator nothing but that, and the sum."""
    [found] = compare(make_estimator(), make_rows(spark), [dml.LayeredSGD(2)], single=False)
    assert found.error is None
    num_bytes = 4 * (15 + NUM_FIXED_STATS)  # of a step: gradients, and stats behind them
    assert found.sent_bytes >= found.steps * num_bytes * (2 + 1 + 1) / 2
    assert found.sent_bytes < found.steps * num_bytes * 2.5


def test_the_table_says_what_failed():
    good = Outcome("good", 2, 1, 10, 1.0, 2.0, 0.5, 0.1, 1e6, 20, 0.25, {"accuracy": 0.9}, 0.1)
    worse = Outcome("worse", 2, 1, 10, 2.0, 2.0, 0.6, 0.1, 2e6, 20, 0.5, {"accuracy": 0.8}, 0.2)
    table = Comparison([good, worse, Outcome("bad", error="<no slots>")], {})
    text = repr(table)
    assert "bad failed: <no slots>" in text
    assert "&lt;no slots&gt;" in table._repr_html_()
    for shown in (text, table._repr_html_()):
        assert "steps: what the strategy counts as one" in shown
        assert "MB sent, messages: sent over the network or through shared memory" in shown
    assert table.frontier == ["good"]
    assert "better in one of them): worse." in text
    assert " ".join(text.splitlines()[1].split()) == "good 2 1 10 0.5 0.1 1 20 0.25 0.9 0.1 *"
    assert table["worse"].loss == 0.5
    with pytest.raises(KeyError, match=r"no strategy 'best': there are 'good', 'worse', 'bad'"):
        table["best"]
    frame = table.to_pandas()
    assert list(frame["sent_megabytes"][:2]) == [1.0, 2.0]
    assert list(frame["frontier"]) == [True, False, False]


def test_a_loss_that_is_no_number_is_not_the_lowest():
    lost = Outcome("lost", 2, 1, 10, 0.5, 1.0, 0.1, 0.1, 1e6, 20, math.nan)
    good = Outcome("good", 2, 1, 10, 1.0, 2.0, 0.5, 0.1, 2e6, 20, 0.25)
    assert "good ended with the lowest loss, 0.25" in repr(Comparison([lost, good], {}))
    assert "lowest" not in repr(Comparison([lost], {}))


@pytest.mark.spark
def test_strategies_side_by_side(spark):
    df = make_rows(spark)
    found = compare(
        make_estimator(), df, {"sync": dml.AllReduce(backend="torch"), "newton": dml.LBFGS()}
    )
    assert [one.name for one in found] == ["sync", "newton", SINGLE]
    sync, _, single = found
    assert [one.workers for one in found] == [2, 2, 1]
    # Of 16 rows at most: workers share them almost evenly. Then iterations; then of 16 rows each.
    assert sync.steps >= 20
    assert [found[1].steps, single.steps] == [2, 20]
    assert single.sent_bytes == 0
    assert single.distance == 0
    # 15 parameters, 7 stats; a ring of two sends as many bytes as the tensor has. Some more go
    # for what is agreed on at the start and the ends.
    steps = sync.steps + 2  # each epoch ends with one that finds no rows left
    assert steps * 22 * 4 <= sync.sent_bytes < steps * 22 * 4 + 1000
    assert 0 < sync.distance < 0.5
    for one in found:
        judged = found.models[one.name].evaluate(df)
        assert (one.loss, one.metrics) == (judged["loss"], {"accuracy": judged["accuracy"]})
        assert one.seconds <= one.wall_seconds
    assert found.plot() is not None


@pytest.mark.spark
def test_bad_arguments_are_found_before_any_training(spark, tmp_path):
    df = make_rows(spark)
    for strategies in ([], {}, [dml.AllReduce(), dml.AllReduce()], ["AllReduce"], dml.AllReduce()):
        with pytest.raises(dml.ParameterError, match="strategies"):
            compare(make_estimator(), df, strategies)
    with pytest.raises(dml.ParameterError, match="checkpoint"):
        compare(make_estimator(checkpoint=str(tmp_path)), df, [dml.AllReduce()])
    with pytest.raises(dml.ParameterError, match="clipNorm"):
        compare(make_estimator(clipNorm=1.0), df, [dml.AllReduce(), dml.LBFGS()])


@pytest.mark.spark
def test_rows_to_judge_by_are_looked_at_before_any_training(spark, monkeypatch):
    monkeypatch.setattr(dml.TorchEstimator, "fit_watched", lambda *_: pytest.fail("it trains"))
    df = make_rows(spark)
    for on, said in ((df.drop("label"), "'label'"), (df.drop("features"), "'features'")):
        with pytest.raises(dml.DataError, match=f"no column {said}"):
            compare(make_estimator(), df, [dml.AllReduce()], on=on)
    scalars = df.selectExpr("features[0] AS features", "label")
    with pytest.raises(dml.DataError, match="the model was trained on"):
        compare(make_estimator(), df, [dml.AllReduce()], on=scalars)


@pytest.mark.spark
def test_a_model_that_can_not_be_judged_is_kept(spark):
    df = make_rows(spark)
    holey = df.selectExpr("features", "IF(label = 2, NULL, label) AS label")
    found = compare(make_estimator(epochs=1), df, [dml.AllReduce()], on=holey)
    for one in found:
        assert "trained, but not judged: sparkdml.errors.DataError: column 'label'" in one.error
        assert one.steps > 0
        assert math.isnan(one.loss)
        assert found.models[one.name].evaluate(df)["loss"] > 0
    assert found[0].distance > 0
    assert "not judged" in repr(found)


@pytest.mark.spark
def test_a_model_that_is_sent_once_is_counted(spark):
    found = compare(make_estimator(epochs=1), make_rows(spark), [dml.Averaging()], single=False)
    assert (found[0].sent_bytes, found[0].messages) == (15 * 8, 1)  # its parameters, as doubles
    alone = compare(make_estimator(numWorkers=1), make_rows(spark), [dml.Averaging()], single=False)
    assert alone[0].sent_bytes == 0


@pytest.mark.spark
@pytest.mark.parametrize(
    ("changes", "strategy", "name"),
    [
        ({"dropLast": True}, dml.Averaging(), "dropLast"),
        ({"samplingCol": "label"}, dml.Averaging(), "samplingCol"),
        ({"onInterrupt": "stop-and-keep"}, dml.Averaging(), "onInterrupt"),
        ({"samplingCol": "label"}, dml.ADPSGD(), "samplingCol"),
        ({"samplingCol": "label"}, dml.AdaptiveBalance(), "samplingCol"),
        ({"samplingCol": "label"}, dml.LBFGS(backups=True), "samplingCol"),
        ({"samplingCol": "label"}, dml.NewtonCG(backups=True), "samplingCol"),
        (
            {"samplingCol": "label"},
            dml.ParameterServer(consistency=dml.TAP(), leased=True),
            "samplingCol",
        ),
        ({}, dml.Gossip(graph=[(0, 2)]), "graph"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_strategy_refuses_is_found_before_any_training(
    spark, monkeypatch, changes, strategy, name
):
    monkeypatch.setattr(dml.TorchEstimator, "fit_watched", lambda *_: pytest.fail("it trains"))
    with pytest.raises(dml.ParameterError, match=f"^{name} must be"):
        compare(make_estimator(**changes), make_rows(spark), [dml.AllReduce(), strategy])


@pytest.mark.spark
def test_a_graph_waits_for_the_number_of_workers_that_spark_has(spark):
    estimator = make_estimator(strategy=dml.Gossip(graph=[(0, 1), (1, 2)]))
    estimator.clear(estimator.getParam("numWorkers"))
    estimator._prepare(make_rows(spark))


@pytest.mark.spark
def test_drawn_rows_are_for_strategies_that_leave_them_where_they_are(spark):
    estimator, df = make_estimator(samplingCol="label"), make_rows(spark)
    for strategy in (dml.AllReduce(), dml.LBFGS(), dml.Gossip()):
        compare_to = estimator.copy()
        if strategy.has_own_optimizer:
            compare_to.clear(compare_to.getParam("optimizer"))
        compare_to._set(strategy=strategy)._prepare(df)


@pytest.mark.spark
def test_without_an_optimizer_the_first_strategy_trains_alone(spark):
    estimator = make_estimator()
    estimator.clear(estimator.getParam("optimizer"))
    found = compare(estimator, make_rows(spark), [dml.LBFGS(), dml.NewtonCG()])
    newton, alone = found[1], found[SINGLE]
    assert all(one.error is None for one in found)
    assert (alone.workers, alone.distance) == (1, 0)
    # The whole sum is that of two workers, but for rounding.
    assert found[0].distance < 1e-2 < newton.distance
