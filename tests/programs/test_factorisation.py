"""Matrix factorisation in disjoint blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import DataError, ParameterError
from sparkdml.programs.factorisation import ITEMS, USERS, begin, factorise, predict, sgd_batch
from sparkdml.programs.scheduling import disjoint_batches, rotate, rows_of_block
from sparkdml.testing.server_cluster import run_workers

SHAPE = (40, 30)


def make_ratings(count=900, seed=0):
    """Of hidden tastes, with a bias for each user."""
    dice = np.random.default_rng(seed)
    tastes, films = dice.normal(size=(SHAPE[0], 2)), dice.normal(size=(SHAPE[1], 2))
    pairs = dice.choice(SHAPE[0] * SHAPE[1], count, replace=False)
    user, item = np.divmod(pairs, SHAPE[1])
    rating = 3 + (tastes[user] * films[item]).sum(axis=1) + 0.3 * dice.normal(size=SHAPE[0])[user]
    return user, item, rating.astype(np.float32)


def one_by_one(users, items, user, item, rating, mean, learning_rate, regularisation):
    """Plain SGD: one rating after the other."""
    for u, i, r in zip(user, item, rating, strict=True):
        p, q = users[u].copy(), items[i].copy()
        error = r - mean - p[-1] - q[-1] - p[:-1] @ q[:-1]
        users[u, :-1] += learning_rate * (error * q[:-1] - regularisation * p[:-1])
        items[i, :-1] += learning_rate * (error * p[:-1] - regularisation * q[:-1])
        users[u, -1] += learning_rate * (error - regularisation * p[-1])
        items[i, -1] += learning_rate * (error - regularisation * q[-1])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), count=st.integers(1, 60))
def test_batches_at_once_equal_ratings_one_by_one(seed, count):
    dice = np.random.default_rng(seed)
    user, item = dice.integers(0, 7, count), dice.integers(0, 5, count)
    rating = dice.normal(size=count).astype(np.float32)
    ours = [dice.normal(size=(7, 4)).astype(np.float32), dice.normal(size=(5, 4)).astype("f4")]
    theirs = [table.copy() for table in ours]
    for batch in disjoint_batches(user, item):
        sgd_batch(*ours, user[batch], item[batch], rating[batch], 0.5, 0.05, 0.1)
        one_by_one(*theirs, user[batch], item[batch], rating[batch], 0.5, 0.05, 0.1)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_it_learns_and_no_worker_ever_holds_a_whole_table(num_workers):
    user, item, rating = make_ratings()
    dice = np.random.default_rng(5)
    spread = dice.integers(0, num_workers, 700)  # as Spark does, whatever the user

    def work(comm, store):
        own = np.flatnonzero(spread == comm.rank)
        factors = factorise(
            store,
            comm,
            user[own],
            item[own],
            rating[own],
            SHAPE,
            rank=4,
            epochs=40,
            learning_rate=0.05,
            regularisation=0.02,
            decay=0.98,
        )
        held = [table.most_rows_held for table in (factors.users, factors.items)]
        comm.barrier()  # or reading for the prediction would count
        return held, factors.errors, factors.predict(user[700:], item[700:])

    results = run_workers(num_workers, work)
    for rank, (held, _, predicted) in enumerate(results):
        assert held[0] == len(rows_of_block(rank, num_workers, SHAPE[0]))
        assert held[1] == -(-SHAPE[1] // num_workers)
        error = np.sqrt(np.mean((predicted - rating[700:]) ** 2))
        assert error < 0.5 * rating.std()
    errors = results[0][1]
    assert len(errors) == 40
    assert errors[-1] < 0.5 * errors[0]


def test_holding_more_than_a_block_is_refused():
    def work(comm, store):
        factors = factorise(store, comm, *make_ratings(), SHAPE, rank=2, epochs=1)
        factors.users.max_rows_held = 10
        factors.predict(*make_ratings()[:2])

    with pytest.raises(ParameterError, match="at most 10 at once"):
        run_workers(1, work)


def test_workers_compute_what_one_would_in_the_same_order():
    user, item, rating = make_ratings(300)
    options = {"learning_rate": 0.05, "decay": 0.9, "regularisation": 0.1, "seed": 3}

    def work(comm, store):
        own = [column[user % 3 == comm.rank] for column in (user, item, rating)]
        factors = factorise(store, comm, *own, SHAPE, rank=3, epochs=2, **options)
        return [np.concatenate([r for _, r in t.blocks(7)]) for t in (factors.users, factors.items)]

    users, items = (np.zeros((rows, 4), dtype=np.float32) for rows in SHAPE)
    for block in range(3):
        for table, what in ((users, USERS), (items, ITEMS)):
            rows = rows_of_block(block, 3, len(table))
            first = np.zeros((len(rows), 4), dtype=np.float32)
            begin(first, np.random.default_rng([3, block, what]))
            table[rows] = first
    mean = float(rating.astype(np.float32).sum(dtype=np.float64) / 300)
    for epoch in range(2):
        for step in range(3):
            for worker in range(3):
                block = rotate(worker, step, 3)
                here = np.flatnonzero((user % 3 == worker) & (item % 3 == block))
                batches = disjoint_batches(user[here], item[here])
                dice = np.random.default_rng([3, epoch, worker, block])
                for place in dice.permutation(len(batches)):
                    at = here[batches[place]]
                    one_by_one(
                        users, items, user[at], item[at], rating[at], mean, 0.05 * 0.9**epoch, 0.1
                    )
    for found in run_workers(3, work, num_servers=2):
        for ours, theirs in zip(found, (users, items), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_prediction_is_mean_biases_and_product():
    users, items = np.array([[1.0, 2.0, 0.5]]), np.array([[3.0, -1.0, 0.25]])
    at = np.zeros(1, dtype=np.int64)
    assert predict(users, items, at, at, 3.0)[0] == pytest.approx(3 + 0.75 + 1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"epochs": 0}, "epochs"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"decay": 1.5}, "decay"),
        ({"regularisation": -1}, "regularisation"),
        ({"rank": 0}, "rank"),
    ],
)
def test_bad_arguments(options, word):
    def work(comm, store):
        factorise(store, comm, *make_ratings(20), SHAPE, **options)

    with pytest.raises(ParameterError, match=word):
        run_workers(1, work)


def test_bad_ratings():
    user, item, rating = make_ratings(20)
    nothing = np.empty(0, dtype=np.int64)

    def work(*columns):
        return lambda comm, store: factorise(store, comm, *columns, SHAPE)

    with pytest.raises(DataError, match="user ids must be from 0 to 39"):
        run_workers(1, work(user + 40, item, rating))
    with pytest.raises(DataError, match="item ids"):
        run_workers(1, work(user, item - 30, rating))
    with pytest.raises(DataError, match="no worker has a rating"):
        run_workers(1, work(nothing, nothing, rating[:0]))
    with pytest.raises(DataError, match="finite"):
        run_workers(1, work(user, item, rating * np.nan))
