"""Positions: an epoch that is left and taken up again gives the same rows, for any worker count."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.order import nothing_read, occurrences, owned, owner_of, shard_of

NUM_ROWS = 400


def worker_chunks(rank, num_workers, chunk_rows=50, num_rows=NUM_ROWS):
    """One worker's rows, their number as content, sorted by a made-up hash."""
    rng = np.random.default_rng(5)
    # Few hashes in each of few shards: shards of several rows are where mistakes would show.
    hashes = rng.integers(0, 64, num_rows) << 52 | rng.integers(0, 1 << 40, num_rows)
    hashes = np.sort(hashes.astype(np.int64))
    rows = np.arange(num_rows)
    mine = owner_of(shard_of(hashes), num_workers) == rank
    rows, hashes = rows[mine], hashes[mine]
    for start in range(0, len(rows), chunk_rows):
        part = slice(start, start + chunk_rows)
        yield Chunk({"id": rows[part]}, hashes[part])


def open_feed(folder, rank=0, num_workers=1, window_rows=90, **kwargs):
    plan = FeedPlan((), seed=3, max_window_rows=window_rows)
    return Feed(worker_chunks(rank, num_workers), plan, str(folder), **kwargs)


def ids(batches):
    return [row for batch in batches for row in batch["id"].tolist()]


@settings(deadline=None, max_examples=60)
@given(
    epoch=st.integers(0, 2),
    shuffle=st.booleans(),
    batch_size=st.integers(1, 60),
    first_stop=st.integers(0, 12),
    second_stop=st.integers(0, 6),
)
def test_what_is_left_comes_in_the_same_order(
    tmp_path_factory, epoch, shuffle, batch_size, first_stop, second_stop
):
    """Left twice, and each time resumed by a process that has only the position."""
    folder = tmp_path_factory.mktemp("spool")
    whole = open_feed(folder)
    expected = list(whole.batches(BatchRequest(batch_size, epoch, shuffle)))
    position, seen = None, []
    for stop in (first_stop, second_stop, None):
        feed = open_feed(folder)
        batches = feed.batches(BatchRequest(batch_size, epoch, shuffle, position))
        part = list(islice(batches, stop))
        seen += part
        position = feed.position_after(len(ids(part)), BatchRequest(1, epoch, shuffle, position))
        feed.close()
    assert [b["id"].tolist() for b in seen] == [b["id"].tolist() for b in expected]
    assert position.sum() == NUM_ROWS
    whole.close()


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    epoch=st.integers(0, 2),
    steps=st.integers(1, 4),
)
def test_each_row_once_whatever_the_number_of_workers(tmp_path_factory, counts, epoch, steps):
    folder = tmp_path_factory.mktemp("spool")
    position, seen = nothing_read(), []
    for turn, num_workers in enumerate(counts):
        reached = nothing_read()
        for rank in range(num_workers):
            feed = open_feed(folder, rank, num_workers)
            mine = owned(position, rank, num_workers)
            batches = feed.batches(BatchRequest(7, epoch, True, mine))
            last = turn == len(counts) - 1
            part = ids(islice(batches, None if last else steps))
            seen += part
            reached += feed.position_after(len(part), BatchRequest(1, epoch, True, mine))
            feed.close()
        position = reached
    assert sorted(seen) == list(range(NUM_ROWS))


def test_the_position_is_known_while_the_stream_still_runs(tmp_path):
    feed = open_feed(tmp_path)
    batches = feed.batches(BatchRequest(10, 0))
    got = ids([next(batches), next(batches)])
    resumed = open_feed(tmp_path)
    rest = ids(
        resumed.batches(BatchRequest(10, 0, position=feed.position_after(20, BatchRequest(1, 0))))
    )
    assert sorted(got + rest) == list(range(NUM_ROWS))
    feed.close()
    resumed.close()


@pytest.mark.parametrize("values", [[], [3], [3, 3, 1, 3, 1]])
def test_occurrences(values):
    values = np.array(values, dtype=np.int64)
    assert occurrences(values).tolist() == [
        values[:i].tolist().count(value) for i, value in enumerate(values.tolist())
    ]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_kept_spool_serves_the_next_process(tmp_path, epoch):
    told = []
    feed = open_feed(tmp_path, on_sealed=told.append)
    expected = (
        ids(feed.batches(BatchRequest(10, 0)))
        if epoch == 0
        else ids(feed.batches(BatchRequest(10, epoch)))
    )
    assert len(told) == 1
    feed.close(keep=True)
    again = Feed.reopen(told[0], feed.plan)
    assert ids(again.batches(BatchRequest(10, epoch))) == expected
    again.close()
    assert not any(tmp_path.iterdir()), "the last user removes it"


def test_a_kept_spool_can_be_read_by_its_owner_only(tmp_path):
    told = []
    feed = open_feed(tmp_path, on_sealed=told.append)
    feed.ingest()
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    feed.close()
