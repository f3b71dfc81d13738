"""ctx.dataset(): map, filter, shuffle, batch, repeat, take and prefetch over a worker's rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparkdml as dml
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import Chunk, Feed, FeedPlan

NUM_ROWS = 50


@pytest.fixture
def feed(tmp_path):
    hashes = np.sort(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, NUM_ROWS))
    columns = {"id": np.arange(NUM_ROWS), "x": np.ones((NUM_ROWS, 2), np.float32)}
    opened = Feed(iter([Chunk(columns, hashes)]), FeedPlan((), 3), str(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def rows(feed):
    return dml.Dataset.over(feed)


def ids(elements):
    return [i for element in elements for i in np.atleast_1d(element["id"]).tolist()]


def test_an_element_is_a_row(rows):
    first = next(iter(rows))
    assert first["id"].item() == 0
    assert first["x"].shape == (2,)
    assert ids(rows) == list(range(NUM_ROWS))


def test_each_pass_is_reshuffled(rows):
    shuffled = rows.shuffle()
    passes = [ids(shuffled) for _ in range(3)]
    assert all(sorted(once) == list(range(NUM_ROWS)) for once in passes)
    assert passes[1] != passes[2]
    assert ids(rows) == list(range(NUM_ROWS)), "the dataset that it was made of stays as it was"


def test_rows_before_a_batch_and_batches_after_it(rows):
    chain = (
        rows.filter(lambda row: row["id"] % 2 == 0)
        .map(lambda row: {"id": row["id"], "twice": row["id"] * 2})
        .batch(10)
        .map(lambda batch: {**batch, "rows": batch.num_rows})
    )
    batches = list(chain)
    assert [batch["rows"] for batch in batches] == [10, 10, 5]
    assert ids(batches) == list(range(0, NUM_ROWS, 2))
    assert torch.equal(batches[0]["twice"], batches[0]["id"] * 2)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 60), drop_last=st.booleans(), by_rows=st.booleans())
def test_batches(tmp_path_factory, n, drop_last, by_rows):
    """The feed's own batches, and those that are stacked row by row, are alike."""
    columns = {"id": np.arange(NUM_ROWS)}
    feed = Feed(
        iter([Chunk(columns, np.arange(NUM_ROWS))]),
        FeedPlan(()),
        str(tmp_path_factory.mktemp("spool")),
    )
    rows = dml.Dataset.over(feed)
    batches = list((rows.map(dict) if by_rows else rows).batch(n, drop_last))
    assert all(isinstance(batch, Batch) for batch in batches)
    kept = NUM_ROWS // n * n if drop_last else NUM_ROWS
    assert ids(batches) == list(range(kept))
    assert all(batch.num_rows == n for batch in batches[:-1])
    feed.close()


def test_the_order_of_the_stages_counts(rows):
    assert ids(rows.take(3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert ids(rows.repeat(2).take(3)) == [0, 1, 2]
    assert [batch.num_rows for batch in rows.repeat(2).batch(40)] == [40, 40, 20]
    assert [batch.num_rows for batch in rows.batch(40).repeat(2)] == [40, 10, 40, 10]
    assert len(ids(rows.repeat().take(120))) == 120


def test_repeating_nothing_ends(rows):
    assert ids(rows.filter(lambda row: False).repeat()) == []


def test_elements_may_be_anything(rows):
    pairs = rows.map(lambda row: (row["x"], int(row["id"]))).batch(8)
    x, number = next(iter(pairs))
    assert x.shape == (8, 2)
    assert number.tolist() == list(range(8))


def test_prefetching_changes_nothing_and_leaves_no_thread(rows):
    assert ids(rows.batch(7).prefetch(3)) == list(range(NUM_ROWS))
    next(iter(rows.batch(7).prefetch(1)))  # left early: the fixture of all tests sees a thread


def test_an_error_in_a_function_is_the_users_own(rows):
    with pytest.raises(ZeroDivisionError):
        list(rows.map(lambda row: 1 // 0).prefetch())


@pytest.mark.parametrize("stage", ["batch", "take", "repeat", "prefetch"])
def test_shuffling_comes_first(rows, stage):
    with pytest.raises(dml.ParameterError, match=r"shuffle\(\) must be called before them"):
        getattr(rows, stage)(3).shuffle()


@pytest.mark.parametrize(
    "call",
    [
        lambda rows: rows.batch(0),
        lambda rows: rows.batch(2.5),
        lambda rows: rows.take(-1),
        lambda rows: rows.repeat(0),
        lambda rows: rows.prefetch(True),
        lambda rows: rows.map(3),
        lambda rows: rows.filter("x"),
    ],
)
def test_words_for_arguments_that_are_wrong(rows, call):
    with pytest.raises(dml.ParameterError, match="must be a"):
        call(rows)
