"""Averaging: contributions add up in any order, one worker is plain SGD, and no gang is needed."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparkdml as dml
from sparkdml.comm.single import SingleCommunicator
from sparkdml.errors import DataError, NonFiniteLoss
from sparkdml.runtime.protocol.roles import num_slots
from sparkdml.strategies.averaging import Averaging
from sparkdml.testing.digits import (
    combined_batches,
    cut,
    digits,
    digits_plan,
    make_normed_reader,
    make_reader,
)
from sparkdml.testing.faults import FaultAt, StopAt
from sparkdml.testing.models import accuracy
from sparkdml.testing.threads import ThreadContext, train_alone, train_rank
from sparkdml.training.contribution import Contribution, EpochSums, add_all, history_of
from sparkdml.training.plan import Schedule
from sparkdml.training.totals import Totals

# -- sums ---------------------------------------------------------------------------------------


def make(rows, value, num_epochs=1):
    epoch = EpochSums(Totals(rows, rows, 2 * rows, (rows / 2,)), rows, rows)
    state = {"w": torch.tensor([value * rows]).double(), "n": torch.tensor(int(rows))}
    return Contribution(rows, state, (epoch,) * num_epochs, rows, None, None)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(-9, 9)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_the_average_is_weighted_by_rows_in_any_order(parts):
    contributions = [make(float(rows), float(value)) for rows, value in parts]
    expected = sum(r * v for r, v in parts) / sum(r for r, _ in parts)
    for order in (contributions, contributions[::-1]):
        total = add_all(order)
        assert total.average()["w"].item() == pytest.approx(expected)
        assert total.average()["n"].item() == max(rows for rows, _ in parts)
        assert history_of(total, digits_plan())[0]["rows"] == sum(rows for rows, _ in parts)


def test_a_worker_that_stopped_early_has_fewer_epochs():
    total = add_all([make(2.0, 1.0, 3), make(3.0, 1.0, 1)])
    assert [row["rows"] for row in history_of(total, digits_plan())] == [5.0, 2.0, 2.0]


def test_no_rows_at_all():
    with pytest.raises(DataError, match="no rows"):
        add_all([make(0.0, 1.0), make(0.0, 1.0)]).average()


# -- training -----------------------------------------------------------------------------------


def contribution_of(part, plan, epochs=2, callbacks=(), rank=0, size=1):
    """Of a worker without peers, whatever its rank is."""
    context = ThreadContext(SingleCommunicator(), part)
    context.rank, context.size = rank, size
    return train_rank(context, Averaging(), plan, Schedule(epochs, 8), callbacks).contribution


def test_one_worker_is_plain_sgd():
    plan = digits_plan(lr=0.1, momentum=0.9)
    rows = digits(100)
    average = contribution_of(rows, plan).average()
    expected = train_alone(plan, [*combined_batches([rows], 8)] * 2).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(average[name].float(), tensor, rtol=1e-4, atol=1e-5)


def test_several_models_are_averaged_with_their_buffers():
    plan = digits_plan(lr=0.1, model=make_normed_reader)
    contributions = [contribution_of(part, plan) for part in cut(digits(90), [60, 30])]
    averages = [contribution.average() for contribution in contributions]
    for name, tensor in add_all(contributions).average().items():
        if tensor.is_floating_point():
            expected = (averages[0][name] * 2 + averages[1][name]) / 3
            torch.testing.assert_close(tensor, expected)


def test_a_worker_without_rows_adds_nothing():
    plan = digits_plan(lr=0.1)  # with a metric
    with_rows, without = (contribution_of(part, plan) for part in cut(digits(60), [60, 0]))
    total = add_all([with_rows, without])
    for name, tensor in with_rows.average().items():
        torch.testing.assert_close(total.average()[name], tensor)
    assert history_of(total, plan)[0]["accuracy"] == history_of(with_rows, plan)[0]["accuracy"]


class Bounded(nn.Module):
    """With a constant that is infinite, as masks are."""

    def __init__(self):
        super().__init__()
        self.reader = make_reader()
        self.register_buffer("lowest", torch.tensor([-torch.inf]))

    def forward(self, x):
        return self.reader(x).maximum(self.lowest)


def test_a_worker_without_rows_spoils_no_infinite_buffer():
    plan = digits_plan(lr=0.1, model=Bounded)
    parts = cut(digits(60), [60, 0])
    total = add_all([contribution_of(part, plan) for part in parts])
    assert total.average()["lowest"].tolist() == [-torch.inf]


def test_a_worker_that_is_stopped_within_an_epoch_counts_with_all_that_it_trained_on():
    """Two epochs and one batch of a third, beside a worker with one batch an epoch."""
    plan = digits_plan(lr=0.1)
    parts = cut(digits(48), [40, 8])
    stops = [StopAt(0, 11)]  # 5 steps an epoch
    contributions = [
        contribution_of(part, plan, epochs=3, callbacks=callbacks)
        for part, callbacks in zip(parts, (stops, ()), strict=True)
    ]
    assert [row["rows"] for row in history_of(contributions[0], plan)] == [40, 40, 16]
    assert [contribution.rows for contribution in contributions] == [96, 24]
    averages = [contribution.average() for contribution in contributions]
    for name, tensor in add_all(contributions).average().items():
        torch.testing.assert_close(tensor, averages[0][name] * 0.8 + averages[1][name] * 0.2)


def test_a_loss_that_is_not_finite_is_told_with_the_rank_of_its_worker():
    rows = {**digits(20), "x": torch.full((20, 64), torch.nan)}
    with pytest.raises(NonFiniteLoss, match="on rank 4"):
        contribution_of(rows, digits_plan(), rank=4, size=6)


def test_its_tasks_need_no_slots_at_the_same_time():
    assert num_slots(Averaging().roles(100)) == 1


# -- on Spark -----------------------------------------------------------------------------------


def estimator(**changes):
    settings = {
        "model": partial(nn.Linear, 4, 3),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.2),
        "strategy": Averaging(),
        "metrics": {"accuracy": accuracy},
        "batchSize": 10,
        "epochs": 3,
        "numWorkers": 6,  # more than there are slots, so that results are added up in a tree
        "seed": 3,
        "verbose": 0,
        "validation": 0.2,
    }
    return dml.TorchEstimator(**{**settings, **changes})


@pytest.fixture(scope="module")
def rows(spark):
    x = np.random.default_rng(0).standard_normal((600, 4)).astype(np.float32)
    labels = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0).astype(int)
    return spark.createDataFrame(
        [(row.tolist(), int(label)) for row, label in zip(x, labels, strict=True)],
        "features array<float>, label long",
    ).cache()


def told(model):
    return [
        {name: value for name, value in row.items() if "second" not in name}
        for row in model.history
    ]


def test_a_killed_task_is_retried_alone(rows, tmp_path):
    plain = estimator().fit(rows)
    fault = FaultAt(rank=4, step=2, kind="kill", folder=str(tmp_path))
    model = estimator(callbacks=[fault]).fit(rows)
    assert any(tmp_path.iterdir()), "it was killed"
    assert told(model) == told(plain)
    for one, other in zip(model.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    first, *_, last = told(model)
    assert first["rows"] == last["rows"]
    assert 400 < last["rows"] < 550
    assert last["loss"] < first["loss"]
    assert "val_loss" in last
    assert "val_loss" not in first
    assert last["val_accuracy"] > 0.6


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"checkpoint": "file:/tmp/never"}, "checkpoint"),
        ({"callbacks": [dml.EarlyStopping("loss")]}, "callbacks"),
        ({"samplingCol": "label"}, "samplingCol"),
        ({"dropLast": True}, "dropLast"),
        ({"syncBatchNorm": True, "model": make_normed_reader}, "syncBatchNorm"),
    ],
)
def test_what_takes_workers_that_agree_is_refused(rows, changes, name):
    with pytest.raises(dml.ParameterError, match=f"^{name} must be"):
        estimator(**changes).fit(rows)
