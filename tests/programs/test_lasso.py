"""Lasso by scheduled coordinate descent, beside scikit-learn's."""

import numpy as np
import pytest
from sklearn.linear_model import Lasso as Reference

from sparkdml.errors import DataError, ParameterError
from sparkdml.parameter_server.kvstore.tables import MatrixTable
from sparkdml.programs.base import run_program
from sparkdml.programs.lasso import Lasso, best_value, fit_lasso
from sparkdml.testing.server_cluster import run_workers


def make_rows(num_rows=240, num_columns=120, seed=0):
    """Few columns matter, and each of the second half is like one of the first."""
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(num_rows, num_columns))
    half = num_columns // 2
    x[:, half : 2 * half] = 0.8 * x[:, :half] + 0.6 * x[:, half : 2 * half]
    true = np.zeros(num_columns)
    true[:8] = 2 * dice.normal(size=8)[:num_columns]
    return x, x @ true + 3 + 0.1 * dice.normal(size=num_rows)


def whole(table):
    return np.concatenate([rows[:, 0] for _, rows in table.blocks(50)])


@pytest.mark.parametrize("num_workers", [1, 3])
def test_it_finds_what_scikit_learn_finds(num_workers):
    x, y = make_rows()
    # Workers with many rows, with few, and the last with none.
    borders = [0, 200, 240, 240] if num_workers == 3 else [0, 240]

    def work(comm, store):
        own = slice(borders[comm.rank], borders[comm.rank + 1])
        table, intercept = fit_lasso(store, comm, x[own], y[own], alpha=0.05)
        return whole(table), intercept, table.most_rows_held

    expected = Reference(alpha=0.05, tol=1e-9, max_iter=100_000).fit(x, y)
    for coefficients, intercept, most_held in run_workers(num_workers, work):
        np.testing.assert_allclose(coefficients, expected.coef_, atol=2e-4)
        assert intercept == pytest.approx(expected.intercept_, abs=2e-3)
        assert most_held < len(coefficients)


def test_it_starts_from_what_the_table_holds():
    x, y = make_rows(100, 20)

    def work(comm, store):
        own = slice(comm.rank, None, 2)
        for alpha in (1.0, 0.3, 0.05):  # a path, each from the last
            table, _ = fit_lasso(store, comm, x[own], y[own], alpha)
            comm.barrier()
        return whole(table)

    expected = Reference(alpha=0.05, tol=1e-9, max_iter=100_000).fit(x, y)
    np.testing.assert_allclose(run_workers(2, work)[0], expected.coef_, atol=2e-4)


def run_centred(x, y, max_rounds=None, **options):
    x, y = x - x.mean(axis=0), y - y.mean()

    def work(comm, store):
        table = MatrixTable(store, "coefficients", x.shape[1], 1)
        program = Lasso(table, x[comm.rank :: 2], y[comm.rank :: 2], len(y), **options)
        run_program(program, comm, max_rounds)
        return program

    return run_workers(2, work)[0]


@pytest.mark.slow
def test_drawing_by_movement_needs_fewer_updates_than_drawing_by_chance():
    x, y = make_rows()
    dynamic, random = (run_centred(x, y, alpha=0.05, dynamic=d) for d in (True, False))
    assert dynamic.objectives[-1] == pytest.approx(random.objectives[-1], rel=1e-5)
    assert dynamic.num_updates + dynamic.num_looks < 0.6 * (random.num_updates + random.num_looks)


def test_no_round_makes_it_worse_however_alike_the_columns_are():
    dice = np.random.default_rng(1)
    x = dice.normal(size=(60, 1)) + 0.05 * dice.normal(size=(60, 40))  # nearly one column
    y = x[:, 0] + 0.1 * dice.normal(size=60)
    program = run_centred(x, y, max_rounds=60, alpha=0.01, width=32, threshold=1.0)
    steps = np.diff(program.objectives)
    assert steps.max() < 1e-6  # the table has single precision
    assert program.objectives[-1] < 0.2 * program.objectives[0]


def test_columns_of_zeros_and_fewer_columns_than_a_round_takes():
    x = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    y = np.array([2.0, 4.0, 6.0, 8.0])

    def work(comm, store):
        table, intercept = fit_lasso(store, comm, x, y, alpha=0.1)
        return whole(table), intercept

    [(coefficients, intercept)] = run_workers(1, work)
    expected = Reference(alpha=0.1).fit(x, y)
    np.testing.assert_allclose(coefficients, expected.coef_, atol=1e-5)
    assert intercept == pytest.approx(expected.intercept_, abs=1e-4)


def test_a_coefficient_is_best_where_its_own_objective_is_least():
    dice = np.random.default_rng(2)
    x, y = dice.normal(size=30), dice.normal(size=30)
    best = best_value(np.array([x @ y]), np.array([x @ x]), 2.0)[0]
    values = best + np.linspace(-1, 1, 201)
    objectives = [np.sum((y - x * value) ** 2) / 2 + 2.0 * abs(value) for value in values]
    assert np.argmin(objectives) == 100
    assert best_value(np.array([1.0]), np.array([1.0]), 2.0)[0] == 0


@pytest.mark.parametrize(
    "options", [{"alpha": -1}, {"tolerance": 0}, {"width": 0}, {"threshold": 0}, {"threshold": 2}]
)
def test_bad_arguments(options):
    x, y = make_rows(10, 4)
    name = next(iter(options))

    def work(comm, store):
        fit_lasso(store, comm, x, y, **{"alpha": 1.0, **options})

    with pytest.raises(ParameterError, match=name):
        run_workers(1, work)


def test_bad_data():
    x, y = make_rows(10, 4)
    with pytest.raises(DataError, match="no worker has a row"):
        run_workers(1, lambda comm, store: fit_lasso(store, comm, x[:0], y[:0], 1.0))
    x[3, 2] = np.nan
    with pytest.raises(DataError, match="finite"):
        run_workers(1, lambda comm, store: fit_lasso(store, comm, x, y, 1.0))
