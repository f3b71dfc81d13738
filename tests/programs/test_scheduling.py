"""Schedules: which blocks may be worked on at the same time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparkdml.programs.scheduling import (
    block_of,
    disjoint_batches,
    draw,
    independent,
    place_in_block,
    rotate,
    rows_of_block,
)


@given(num_workers=st.integers(1, 9), start=st.integers(0, 30))
def test_in_a_rotation_no_two_workers_share_a_block_and_each_gets_every_block(num_workers, start):
    rounds = [
        [rotate(worker, start + r, num_workers) for worker in range(num_workers)]
        for r in range(num_workers)
    ]
    assert all(len(set(blocks)) == num_workers for blocks in rounds)
    assert all(len({blocks[w] for blocks in rounds}) == num_workers for w in range(num_workers))


@given(num_rows=st.integers(1, 50), num_blocks=st.integers(1, 8))
def test_blocks_hold_each_row_once_where_it_is_looked_for(num_rows, num_blocks):
    rows = np.arange(num_rows)
    blocks = [rows_of_block(b, num_blocks, num_rows) for b in range(num_blocks)]
    assert sorted(np.concatenate(blocks)) == rows.tolist()
    for row, block, place in zip(
        rows, block_of(rows, num_blocks), place_in_block(rows, num_blocks), strict=True
    ):
        assert blocks[block][place] == row


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_entries=st.integers(0, 60), num_columns=st.integers(1, 3))
def test_batches_repeat_no_value_and_lose_no_entry(data, num_entries, num_columns):
    columns = [
        data.draw(arrays(np.int64, num_entries, elements=st.integers(0, 9)))
        for _ in range(num_columns)
    ]
    batches = disjoint_batches(*columns)
    for batch in batches:
        assert len(batch)
        for column in columns:
            assert len(set(column[batch])) == len(batch)
    assert sorted(entry for batch in batches for entry in batch) == list(range(num_entries))
    most = max((np.bincount(column).max(initial=0) for column in columns), default=0)
    assert most <= len(batches) <= max(1, num_columns) * most


def test_a_draw_follows_the_priorities():
    dice = np.random.default_rng(3)
    priorities = np.array([1.0, 1.0, 8.0, 0.0])
    with np.errstate(divide="ignore"):
        first = [draw(priorities, 2, dice)[0] for _ in range(2_000)]
    assert first.count(2) / 2_000 == pytest.approx(0.8, abs=0.05)
    assert 3 not in first


def test_a_draw_of_more_than_there_are_is_all_of_them():
    drawn = draw(np.ones(5), 9, np.random.default_rng(0))
    assert sorted(drawn) == [0, 1, 2, 3, 4]


@settings(deadline=None, max_examples=60)
@given(
    x=arrays(np.float64, (12, 8), elements=st.floats(-2, 2).map(lambda v: round(v, 2))),
    threshold=st.floats(0.05, 1.0),
    most=st.integers(1, 8),
)
def test_what_is_chosen_is_independent_enough_never_to_overshoot(x, threshold, most):
    gram = x.T @ x
    chosen = independent(gram, threshold, most)
    assert chosen[0] == 0
    assert len(chosen) <= most
    kept = gram[np.ix_(chosen, chosen)]
    norms = np.sqrt(np.diag(kept))
    norms[norms == 0] = 1
    correlation = kept / np.outer(norms, norms)
    apart = correlation - np.diag(np.diag(correlation))
    assert (np.abs(apart) < threshold).all()
    # The diagonal and a half bounds the products: a step in all of them at once is downhill.
    assert np.linalg.eigvalsh(apart).max(initial=0) < 0.5 + 1e-9


def test_a_copy_of_a_column_waits():
    x = np.random.default_rng(0).normal(size=(100, 3))
    x[:, 1] = 2 * x[:, 0]
    assert independent(x.T @ x, 0.5, 3).tolist() == [0, 2]
