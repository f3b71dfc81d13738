"""Rows drawn in proportion to a column: counts, order, and positions to resume from."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import DataError
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.order import NUM_SHARDS, nothing_read, owned, owner_of, shard_of
from sparkdml.feed.sampling import Draws, rate_of, weight_sums

NUM_ROWS = 300


def weights_of(num_rows=NUM_ROWS):
    return np.random.default_rng(1).choice([0.0, 0.1, 1.0, 2.5, 7.0], num_rows)


def worker_chunks(rank, num_workers, weights, chunk_rows=40):
    rng = np.random.default_rng(5)
    hashes = rng.integers(0, 64, len(weights)) << 52 | rng.integers(0, 1 << 40, len(weights))
    hashes = np.sort(hashes.astype(np.int64))
    rows = np.arange(len(weights))
    mine = owner_of(shard_of(hashes), num_workers) == rank
    rows, hashes = rows[mine], hashes[mine]
    for start in range(0, len(rows), chunk_rows):
        part = slice(start, start + chunk_rows)
        yield Chunk({"id": rows[part]}, hashes[part], draws=weights[rows[part]])


def open_feeds(folder, num_workers=1, weights=None, window_rows=90, **plan):
    """All workers of a run, agreed on the rate as an allreduce would."""
    weights = weights_of() if weights is None else weights
    plan = FeedPlan((), 3, sampling="w", max_window_rows=window_rows, **plan)
    feeds = [
        Feed(worker_chunks(rank, num_workers, weights), plan, str(folder), rank=rank)
        for rank in range(num_workers)
    ]
    sums = []
    for feed in feeds:
        feed.agree_on_draws(lambda own: sums.append(own) or np.maximum(own, 1.0))
    for feed in feeds:
        feed.agree_on_draws(lambda own: sum(sums))
    return feeds


def ids(batches):
    return [row for batch in batches for row in batch["id"].tolist()]


def close(feeds):
    for feed in feeds:
        feed.close()


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.floats(0, 50), min_size=1, max_size=150).filter(lambda w: sum(w) > 1e-3),
    num_workers=st.integers(1, 4),
    epoch=st.integers(0, 3),
    batch_size=st.integers(1, 50),
    shuffle=st.booleans(),
)
def test_a_row_is_drawn_its_rate_rounded_up_or_down(
    tmp_path_factory, weights, num_workers, epoch, batch_size, shuffle
):
    weights = np.array(weights)
    feeds = open_feeds(tmp_path_factory.mktemp("spool"), num_workers, weights)
    seen = [
        row for feed in feeds for row in ids(feed.batches(BatchRequest(batch_size, epoch, shuffle)))
    ]
    counts = np.bincount(seen, minlength=len(weights))
    rates = weights * len(weights) / weights.sum()
    assert (counts >= np.floor(rates - 1e-9)).all()
    assert (counts <= np.ceil(rates + 1e-9)).all()
    close(feeds)


def test_draws_are_in_proportion_over_many_epochs():
    shards, counts = np.arange(10), np.full(10, 30)
    weights = weights_of(300)
    rate = rate_of(weight_sums(shards, counts, weights))
    draws = Draws(3, rate, shards, counts, weights)
    epochs = 400
    drawn = np.zeros(300)
    for epoch in range(epochs):
        rows = draws.rows(epoch, shards)
        assert len(rows) == draws.counts(epoch).sum()
        assert abs(len(rows) - 300) < 60
        drawn += np.bincount(rows, minlength=300)
    rates = weights * 300 / weights.sum()
    assert np.abs(drawn / epochs - rates).max() < 0.12  # 5 standard deviations of a rounding
    assert not drawn[weights == 0].any()


def test_the_same_draws_for_any_reader(tmp_path):
    drawn = []
    for num_workers in (1, 2, 3):
        feeds = open_feeds(tmp_path, num_workers)
        drawn.append(
            [
                sorted(r for f in feeds for r in ids(f.batches(BatchRequest(16, e))))
                for e in range(3)
            ]
        )
        close(feeds)
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_the_sum_of_weights_has_the_same_bits_for_any_owners_of_shards():
    rng = np.random.default_rng(0)
    shards, counts = np.arange(0, NUM_SHARDS, 7), rng.integers(1, 9, len(range(0, NUM_SHARDS, 7)))
    weights = rng.random(counts.sum())
    whole = weight_sums(shards, counts, weights)
    parts = np.zeros_like(whole)
    for rank in range(3):
        mine = owner_of(shards, 3) == rank
        parts += weight_sums(shards[mine], counts[mine], weights[np.repeat(mine, counts)])
    assert rate_of(parts) == rate_of(whole)


@settings(deadline=None, max_examples=40)
@given(
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 60),
    first_stop=st.integers(0, 8),
    second_stop=st.integers(0, 6),
)
def test_what_is_left_comes_in_the_same_order(
    tmp_path_factory, epoch, shuffle, batch_size, first_stop, second_stop
):
    folder = tmp_path_factory.mktemp("spool")
    (whole,) = open_feeds(folder)
    expected = [
        batch["id"].tolist() for batch in whole.batches(BatchRequest(batch_size, epoch, shuffle))
    ]
    position, seen = None, []
    for stop in (first_stop, second_stop, None):
        (feed,) = open_feeds(folder)
        part = [
            batch["id"].tolist()
            for batch in islice(
                feed.batches(BatchRequest(batch_size, epoch, shuffle, position)), stop
            )
        ]
        seen += part
        position = feed.position_after(
            sum(map(len, part)), BatchRequest(1, epoch, shuffle, position)
        )
        feed.close()
    assert seen == expected
    assert position.sum() == sum(map(len, expected))
    whole.close()


@settings(deadline=None, max_examples=20)
@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    epoch=st.integers(0, 2),
    steps=st.integers(1, 4),
)
def test_each_draw_once_whatever_the_number_of_workers(tmp_path_factory, counts, epoch, steps):
    folder = tmp_path_factory.mktemp("spool")
    (whole,) = open_feeds(folder)
    expected = sorted(ids(whole.batches(BatchRequest(50, epoch))))
    whole.close()
    position, seen = nothing_read(), []
    for turn, num_workers in enumerate(counts):
        reached = nothing_read()
        feeds = open_feeds(folder, num_workers)
        for rank, feed in enumerate(feeds):
            mine = owned(position, rank, num_workers)
            last = turn == len(counts) - 1
            part = ids(
                islice(feed.batches(BatchRequest(7, epoch, True, mine)), None if last else steps)
            )
            seen += part
            reached += feed.position_after(len(part), BatchRequest(1, epoch, True, mine))
        close(feeds)
        position = reached
    assert sorted(seen) == expected


def test_held_out_rows_come_once_and_are_never_drawn(tmp_path):
    (feed,) = open_feeds(tmp_path, validation=0.25)
    held_out = ids(feed.validation_batches(32))
    assert len(held_out) == len(set(held_out)) > 40
    assert not set(held_out) & set(ids(feed.batches(BatchRequest(32, 1))))
    feed.close()


def test_a_kept_spool_is_drawn_from_as_before(tmp_path):
    told = []
    plan = FeedPlan((), 3, sampling="w")
    feed = Feed(worker_chunks(0, 1, weights_of()), plan, str(tmp_path), on_sealed=told.append)
    expected = [ids(feed.batches(BatchRequest(16, epoch))) for epoch in range(2)]
    feed.close(keep=True)
    again = Feed.reopen(told[0], plan)
    assert [ids(again.batches(BatchRequest(16, epoch))) for epoch in range(2)] == expected
    again.close()


def test_weights_that_are_all_zero(tmp_path):
    feed = Feed(worker_chunks(0, 1, np.zeros(20)), FeedPlan((), sampling="w"), str(tmp_path))
    with pytest.raises(DataError, match="samplingCol 'w' is 0 in every row"):
        feed.agree_on_draws()
    feed.close()
