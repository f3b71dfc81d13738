"""Second-order methods on the full data: they find scipy's minimum, however the rows are spread."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchmetrics.classification import BinaryAccuracy

from sparkdml.errors import DataError, ParameterError
from sparkdml.strategies.second_order.lbfgs import LBFGS, combined, direction_coefficients
from sparkdml.strategies.second_order.newton_cg import NewtonCG
from sparkdml.testing.digits import cut
from sparkdml.testing.faults import FailsAt, Injected, StopAt
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.strategy_contract import assert_alike, told
from sparkdml.testing.threads import train_on_threads
from sparkdml.testing.waiting import wait_until
from sparkdml.training.callbacks import GradientMonitor, LearningRateSchedule
from sparkdml.training.epoch import Epoch
from sparkdml.training.optimizers import NoOptimizer
from sparkdml.training.plan import Schedule
from sparkdml.training.task import TaskPlan
from sparkdml.training.training import TrainingPlan

sys.path.insert(0, str(Path(__file__).parents[1]))
from strategy_cases import SECOND_ORDER, SecondOrderContract

METHODS = [LBFGS, NewtonCG]


def make_plan(**changes):
    fields = {
        "model": lambda: nn.Linear(30, 1).double(),
        "loss": nn.BCEWithLogitsLoss(),
        "optimizer": NoOptimizer,
        "features": ("x",),
        "label": "y",
        "metrics": {},
        "batch_size": 64,
    }
    return TaskPlan(**{**fields, **changes})


@lru_cache(maxsize=1)
def tumours():
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return {"x": torch.tensor(x), "y": torch.tensor(y, dtype=torch.float64)}


def minimise(value_and_gradient, count):
    from scipy.optimize import minimize

    options = {"gtol": 1e-12, "ftol": 1e-16, "maxiter": 5_000}
    found = minimize(
        value_and_gradient, np.zeros(count), jac=True, method="L-BFGS-B", options=options
    )
    return found.x


def weights(module):
    """A linear module's, in scipy's order."""
    return torch.cat([module.weight.detach().reshape(-1), module.bias.detach()]).double().numpy()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [[569], [300, 0, 200, 69]])
def test_logistic_regression_equals_scipys(method, sizes):
    rows, l2 = tumours(), 0.01
    x, y = rows["x"].numpy(), rows["y"].numpy()

    def pooled(w):
        z = x @ w[:-1] + w[-1]
        residual = 1 / (1 + np.exp(-z)) - y
        value = np.mean(np.logaddexp(0, z) - y * z) + 0.5 * l2 * w @ w
        return value, np.append(x.T @ residual / len(y), residual.mean()) + l2 * w

    expected = minimise(pooled, 31)
    trainings = train_on_threads(
        partial(method, l2=l2, tolerance=1e-9), make_plan(), Schedule(80, 64), cut(rows, sizes)
    )
    for training in trainings:
        np.testing.assert_allclose(weights(training.task.module), expected, atol=1e-6)
    assert_alike(trainings[1:], trainings[0].task.module, rtol=0, atol=0)
    first = trainings[0]
    assert "tolerance=1e-09" in first.stopped
    assert first.history[-1]["gradient_norm"] <= 1e-9
    assert sum(row["passes"] for row in first.history) < 60
    assert all(training.history[-1]["loss"] == first.history[-1]["loss"] for training in trainings)


@pytest.mark.parametrize("method", METHODS)
def test_ridge_regression_equals_the_normal_equations(method):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 5, generator=generator, dtype=torch.float64)
    rows = {"x": x, "y": x @ torch.arange(5.0, dtype=torch.float64) + 2.0}
    l2 = 0.3
    with_one = np.column_stack([x.numpy(), np.ones(90)])
    # The mean of (Xw - y)^2 plus l2/2 |w|^2: its gradient is 2 X'(Xw - y) / n + l2 w.
    normal = 2 * with_one.T @ with_one / 90 + l2 * np.eye(6)
    expected = np.linalg.solve(normal, 2 * with_one.T @ rows["y"].numpy() / 90)
    plan = make_plan(model=lambda: nn.Linear(5, 1).double(), loss=nn.MSELoss())
    trainings = train_on_threads(
        partial(method, l2=l2, tolerance=1e-10), plan, Schedule(40, 64), cut(rows, [70, 20])
    )
    np.testing.assert_allclose(weights(trainings[1].task.module), expected, atol=1e-8)


def test_single_precision_ends_by_itself():
    rows = {name: value.float() for name, value in tumours().items()}
    plan = make_plan(model=lambda: nn.Linear(30, 1))
    make = partial(LBFGS, l2=0.01, tolerance=0.0)
    first = train_on_threads(make, plan, Schedule(200, 64), cut(rows, [400, 169]))[0]
    assert len(first.history) < 200
    assert "in float32's precision" in first.stopped
    assert first.history[-1]["gradient_norm"] < 1e-5


def test_losses_of_sums_and_class_weights_and_row_weights_are_exact_over_ranks():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(120, 4, generator=generator, dtype=torch.float64)
    rows = {
        "x": x,
        "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long(),
        "w": torch.rand(120, generator=generator, dtype=torch.float64),
    }
    plan = make_plan(model=lambda: nn.Linear(4, 3).double(), loss=loss, weight="w")
    make = partial(LBFGS, l2=0.1, tolerance=1e-10)
    alone = train_on_threads(make, plan, Schedule(50, 64), [rows])[0]
    spread = train_on_threads(make, plan, Schedule(50, 7), cut(rows, [80, 3, 37]))
    assert_alike(spread, alone.task.module, rtol=0, atol=1e-8)


def test_dropout_is_the_same_in_every_pass():
    def make():
        return nn.Sequential(nn.Dropout(0.3), nn.Linear(30, 1).double())

    make_strategy = partial(LBFGS, l2=0.01, tolerance=1e-7)
    first = train_on_threads(make_strategy, make_plan(model=make), Schedule(80, 64), [tumours()])[0]
    assert "tolerance" in first.stopped


def thread_rank():
    return int(threading.current_thread().name.rsplit("-", 1)[1])


class SlowOnRank(nn.Module):
    """Counts the rows that each rank computes; one takes longer over a batch than the others over
    all that they find to do in the pass.
    """

    def __init__(self, rows_of, passes_of, slow_rank):
        super().__init__()
        self.linear = nn.Linear(30, 1).double()
        self._rows_of, self._passes_of, self._slow_rank = rows_of, passes_of, slow_rank

    def forward(self, x):
        rank = thread_rank()
        self._rows_of[rank] += len(x)
        if rank == self._slow_rank:
            wait_until(self._others_are_done)
        return self.linear(x)

    def _others_are_done(self):
        passes = list(self._passes_of)
        own = passes.pop(self._slow_rank)
        return min(passes) > own


@pytest.mark.parametrize("method", METHODS)
def test_backups_compute_what_a_slow_rank_has_not_come_to(method, monkeypatch):
    passes_of = [0, 0, 0]
    whole_pass = Epoch.whole_pass

    def counted_pass(epoch):
        yield from whole_pass(epoch)
        passes_of[thread_rank()] += 1

    monkeypatch.setattr(Epoch, "whole_pass", counted_pass)
    parts, schedule = cut(tumours(), [200, 200, 169]), Schedule(3, 8)
    runs = {}
    for slow_rank in (None, 2):
        rows_of = [0, 0, 0]
        model = partial(SlowOnRank, rows_of, passes_of, slow_rank)
        make = partial(method, l2=0.01, tolerance=1e-9, backups=slow_rank is not None)
        plan = make_plan(model=model, batch_size=8)
        runs[slow_rank] = train_on_threads(make, plan, schedule, parts)
    first = runs[2][0]
    passes = sum(row["passes"] for row in first.history)
    assert rows_of[2] <= 8 * passes  # no more than the batch that it was slow over
    assert all(row["rows"] == 569 for row in first.history)  # each once, whichever rank computed it
    assert_alike(runs[2], runs[None][0].task.module, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_where_it_reached_the_tolerance_can_be_resumed(method):
    """The point is known to be the last one, and no rank asks for the end any more."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 5, generator=generator, dtype=torch.float64)
    rows = {"x": x, "y": x @ torch.arange(5.0, dtype=torch.float64)}
    plan = make_plan(model=lambda: nn.Linear(5, 1).double(), loss=nn.MSELoss())

    def train(stops_at, kept=None):
        return train_on_threads(
            partial(method, tolerance=1e-6),
            plan,
            Schedule(40, 64),
            cut(rows, [60, 30]),
            callbacks=[StopAt(0, stops_at)],
            checkpoints=kept,
        )

    last = train(0)[0].step
    kept = MemoryCheckpoints(every=1000)
    stopped = train(last - 1, kept)[0]
    assert (stopped.step, stopped.stopped) == (last, "a test asked")
    for training in train(0, kept):
        assert "tolerance=1e-06" in training.stopped
        assert_alike([training], stopped.task.module, rtol=0, atol=0)


@pytest.mark.parametrize("backups", [False, True])
def test_a_step_that_does_not_divide_by_the_workers_resumes(backups):
    """24 rows on 5 ranks: with backups all take 5, so that every rank has the same batches."""
    few, kept, plan = {n: v[:100] for n, v in tumours().items()}, MemoryCheckpoints(), make_plan()
    make = partial(LBFGS, l2=0.1, tolerance=1e-9, backups=backups)
    train_on_threads(make, plan, Schedule(1, 8), cut(few, [40, 30, 30]), checkpoints=kept)
    parts = cut(few, [40, 0, 0, 30, 30])
    resumed = train_on_threads(make, plan, Schedule(60, 8), parts, checkpoints=kept)
    assert {row["rows"] for row in resumed[0].history} == {100}
    expected = train_on_threads(partial(make, backups=False), plan, Schedule(60, 64), [few])
    assert_alike(resumed, expected[0].task.module, rtol=0, atol=1e-7)


class NotesSizes(nn.Linear):
    """Of what it is given in one piece."""

    def __init__(self, sizes):
        super().__init__(30, 1, dtype=torch.float64)
        self._sizes = sizes

    def forward(self, x):
        self._sizes.add(len(x))
        return super().forward(x)


def test_hessian_and_gradient_are_of_the_same_pieces():
    """24 rows a step on 2 ranks are 12 each, which 8 at once makes 6 and 6: else BatchNorm would
    make two functions of it."""
    few, kept, sizes = {n: v[:96] for n, v in tumours().items()}, MemoryCheckpoints(), set()
    plan = make_plan(model=partial(NotesSizes, sizes), batch_size=8)
    train_on_threads(NewtonCG, plan, Schedule(1, 8), cut(few, [32, 32, 32]), checkpoints=kept)
    sizes.clear()
    train_on_threads(NewtonCG, plan, Schedule(2, 8), cut(few, [48, 48]), checkpoints=kept)
    assert sizes == {6}


def test_metric_objects_are_refused_with_backups():
    metric = BinaryAccuracy()
    plan = make_plan(metrics={"accuracy": metric})
    strategy = LBFGS(backups=True)
    with pytest.raises(ParameterError, match="metrics"):
        strategy.check(TrainingPlan(plan, Schedule(1, 8)))


def test_rows_without_weight_are_refused():
    rows = {**tumours(), "w": torch.zeros(569, dtype=torch.float64)}
    with pytest.raises(DataError, match="no row has a weight"):
        train_on_threads(LBFGS, make_plan(weight="w"), Schedule(1, 64), cut(rows, [500, 69]))


def test_a_gradient_that_is_not_finite_is_said_to_be_so():
    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            return torch.sqrt(self.weight) * x

    rows = {"x": torch.ones(8, 1, dtype=torch.float64), "y": torch.zeros(8, dtype=torch.float64)}
    plan = make_plan(model=Rooted, loss=nn.L1Loss())
    with pytest.raises(DataError, match="root of zero"):
        train_on_threads(LBFGS, plan, Schedule(1, 8), cut(rows, [5, 3]))


@settings(deadline=None, max_examples=40)
@given(num_pairs=st.integers(0, 6), size=st.integers(2, 9), seed=st.integers(0, 1000))
def test_coefficients_equal_the_recursion_on_vectors(num_pairs, size, seed):
    generator = np.random.default_rng(seed)
    root = generator.normal(size=(size, size))
    steps = generator.normal(size=(num_pairs, size))
    changes = steps @ (root @ root.T + np.eye(size))
    gradient = generator.normal(size=size)
    expected, shares = -gradient, []
    for s, y in reversed(list(zip(steps, changes, strict=True))):
        shares.append(s @ expected / (s @ y))
        expected = expected - shares[-1] * y
    if num_pairs:
        expected = expected * (steps[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
    for s, y, share in zip(steps, changes, reversed(shares), strict=True):
        expected = expected + s * (share - y @ expected / (s @ y))
    vectors = np.concatenate([steps, changes, gradient[None]])
    products = (vectors @ vectors.T).tolist()
    coefficients = direction_coefficients(products)
    np.testing.assert_allclose(coefficients @ vectors, expected, rtol=1e-6, atol=1e-8)
    slope = combined(coefficients, products, 2 * num_pairs)
    assert slope == pytest.approx(expected @ gradient, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("changes", "schedule", "callbacks", "words"),
    [
        ({"clip_norm": 1.0}, {}, (), "clipNorm"),
        ({"parameter_groups": lambda module: []}, {}, (), "parameterGroups"),
        ({"precision": "fp16"}, {}, (), "precision"),
        ({}, {"accumulate": 2}, (), "gradientAccumulation"),
        (
            {},
            {},
            (LearningRateSchedule(partial(torch.optim.lr_scheduler.StepLR, step_size=1)),),
            "no learning rate",
        ),
        ({}, {}, (GradientMonitor(),), "on_gradient"),
    ],
)
def test_what_it_would_ignore_is_refused(changes, schedule, callbacks, words):
    strategy = LBFGS()
    plan = TrainingPlan(make_plan(**changes), replace(Schedule(1, 8), **schedule), callbacks)
    with pytest.raises(ParameterError, match=words):
        strategy.check(plan)


def test_newtons_method_resumes_and_refuses():
    """What the suite below shows of LBFGS, where it could differ; digits would take too long."""
    make, parts = partial(NewtonCG, l2=0.01, max_products=4), cut(tumours(), [300, 0, 269])

    def train(checkpoints, fails_at=0):
        callbacks = [FailsAt(2, fails_at)]
        schedule = Schedule(5, 64)
        return train_on_threads(
            make, make_plan(), schedule, parts, callbacks=callbacks, checkpoints=checkpoints
        )

    expected, kept = train(MemoryCheckpoints()), MemoryCheckpoints()
    with pytest.raises(Injected):
        train(kept, fails_at=3)
    resumed = train(kept)
    assert told(resumed[0]) == told(expected[0])
    assert_alike(resumed, expected[0].task.module, rtol=0, atol=0)
    assert repr(make()).startswith("NewtonCG(")
    with pytest.raises(ParameterError, match="max_products"):
        NewtonCG(max_products=0)


def test_a_loss_that_is_linear_has_no_curvature_and_goes_down_the_gradient():
    rows = {"x": torch.ones(40, 2, dtype=torch.float64), "y": torch.zeros(40)}
    plan = make_plan(
        model=lambda: nn.Linear(2, 1, bias=False).double(),
        loss=lambda outputs, targets: outputs[:, 0],
    )
    first = train_on_threads(
        partial(NewtonCG, max_trials=3), plan, Schedule(2, 64), cut(rows, [30, 10])
    )[0]
    assert first.history[1]["loss"] < first.history[0]["loss"]


class TestContract(SecondOrderContract):
    cases = SECOND_ORDER
