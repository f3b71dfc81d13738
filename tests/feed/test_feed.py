"""The feed without Spark: rows in chunks of any size come out once an epoch, as tensors."""

import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import DataError
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan, ReadAhead, is_validation


def chunks_of(num_rows, chunk_rows, seed=0):
    """Rows with their number as content, sorted by a made-up hash as Spark would have them."""
    rng = np.random.default_rng(seed)
    hashes = np.sort(rng.integers(-(2**63), 2**63 - 1, num_rows, dtype=np.int64))
    for start in range(0, num_rows, chunk_rows):
        rows = np.arange(start, min(start + chunk_rows, num_rows))
        columns = {"id": rows, "x": np.stack([rows, rows], axis=1).astype(np.float32)}
        yield Chunk(columns, hashes[rows])


def make_feed(tmp_path, num_rows=1000, chunk_rows=64, **plan):
    return Feed(chunks_of(num_rows, chunk_rows), FeedPlan((), seed=3, **plan), str(tmp_path))


def ids(batches):
    return [i for batch in batches for i in batch["id"].tolist()]


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(0, 300),
    chunk_rows=st.integers(1, 70),
    batch_size=st.integers(1, 70),
    window_rows=st.integers(1, 200),
)
def test_every_row_once_an_epoch(tmp_path_factory, num_rows, chunk_rows, batch_size, window_rows):
    feed = make_feed(
        tmp_path_factory.mktemp("spool"), num_rows, chunk_rows, max_window_rows=window_rows
    )
    for epoch in range(3):
        batches = list(feed.batches(BatchRequest(batch_size, epoch)))
        assert sorted(ids(batches)) == list(range(num_rows))
        assert all(batch.num_rows == batch_size for batch in batches[:-1])
    feed.close()


def test_columns_stay_together_and_keep_their_types(tmp_path):
    feed = make_feed(tmp_path)
    for epoch in (0, 1):
        for batch in feed.batches(BatchRequest(100, epoch)):
            assert batch["id"].dtype == torch.int64
            assert batch["x"].dtype == torch.float32
            assert torch.equal(batch["x"][:, 0], batch["id"].float())
    feed.close()


def test_epochs_are_reshuffled_and_reproducible(tmp_path):
    feed, again = make_feed(tmp_path), make_feed(tmp_path)
    first = [ids(feed.batches(BatchRequest(64, epoch))) for epoch in range(3)]
    assert first[0] == list(range(1000))  # the order of the hashes
    assert first[1] != first[2]
    # Another worker process that begins with epoch 2, as after a failure, reads the same.
    assert ids(again.batches(BatchRequest(64, 2))) == first[2]
    assert ids(again.batches(BatchRequest(64, 0))) == first[0]
    for one in (feed, again):
        one.close()


def test_without_shuffling_every_epoch_is_alike(tmp_path):
    feed = make_feed(tmp_path)
    assert ids(feed.batches(BatchRequest(64, 0))) == ids(
        feed.batches(BatchRequest(64, 1, shuffle=False))
    )
    feed.close()


def test_an_epoch_left_early_loses_nothing(tmp_path):
    feed = make_feed(tmp_path)
    next(feed.batches(BatchRequest(10, 0)))
    assert sorted(ids(feed.batches(BatchRequest(64, 1)))) == list(range(1000))
    assert feed.num_rows == 1000
    feed.close()


def test_a_fraction_is_held_out(tmp_path):
    feed = make_feed(tmp_path, validation=0.2)
    training, held_out = ids(feed.batches(BatchRequest(64, 0))), ids(feed.validation_batches(64))
    assert sorted(training + held_out) == list(range(1000))
    assert 150 < len(held_out) < 250
    assert sorted(ids(feed.batches(BatchRequest(64, 1)))) == sorted(training)
    feed.close()


def test_a_column_marks_what_is_held_out(tmp_path):
    def marked():
        for chunk in chunks_of(100, 30):
            yield Chunk(chunk.columns, chunk.hashes, chunk.columns["id"] % 4 == 0)

    feed = Feed(marked(), FeedPlan((), validation="is_test"), str(tmp_path))
    assert all(i % 4 for i in ids(feed.batches(BatchRequest(8))))
    assert ids(feed.validation_batches(8)) == list(range(0, 100, 4))
    feed.close()


@given(st.floats(0.01, 0.99))
def test_the_held_out_fraction_is_about_right(fraction):
    hashes = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 20_000, dtype=np.int64)
    assert abs(is_validation(hashes, fraction).mean() - fraction) < 0.02


def test_the_spool_is_invisible_to_others(tmp_path):
    feed = make_feed(tmp_path)
    feed.ingest()
    assert os.listdir(tmp_path) == []
    feed.close()


def test_an_error_in_the_stream_is_raised_where_the_rows_are_read(tmp_path):
    def broken():
        yield from chunks_of(100, 50)
        raise DataError("column 'x' is null in the row (id=7)")

    feed = Feed(broken(), FeedPlan(()), str(tmp_path))
    with pytest.raises(DataError, match="id=7"):
        list(feed.batches(BatchRequest(10)))
    feed.close()


def test_rows_of_another_shape_are_refused(tmp_path):
    def growing():
        for width in (2, 3):
            rows = np.zeros((5, width), dtype=np.float32)
            yield Chunk({"x": rows}, np.arange(5) + width)

    feed = Feed(growing(), FeedPlan(()), str(tmp_path))
    with pytest.raises(DataError, match=r"'x' has rows of shape \[3\] and of shape \[2\]"):
        feed.ingest()
    feed.close()


def test_batches_that_are_still_referenced_are_not_overwritten(tmp_path):
    feed = make_feed(tmp_path)
    kept = [batch["x"][3:] for batch in feed.batches(BatchRequest(50, 1))]
    again = [batch["x"][3:].clone() for batch in feed.batches(BatchRequest(50, 1))]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    feed.close()


def test_memory_of_unreferenced_batches_is_reused(tmp_path):
    feed = make_feed(tmp_path)
    places = [batch["x"].data_ptr() for batch in feed.batches(BatchRequest(50, 1))]
    assert len(set(places)) <= 4
    feed.close()


@given(st.integers(0, 6), st.lists(st.booleans(), max_size=12))
def test_whenever_it_reads_ahead_the_items_are_the_same(num_items, turns):
    items = ReadAhead(iter(range(num_items)))
    found = []
    for advances in turns:
        if advances:
            items.advance()
        elif (item := next(items, None)) is not None:
            found.append(item)
    assert found + list(items) == list(range(num_items))


def test_one_item_is_read_ahead_and_its_time_is_told():
    read, timed = [], []

    def source():
        for item in range(3):
            read.append(item)
            yield item

    @contextmanager
    def timing():
        timed.append(len(read))
        yield

    items = ReadAhead(source(), timing)
    items.advance()
    items.advance()
    assert read == [0]
    assert timed == [0]
    assert [next(items), next(items)] == [0, 1]
    assert timed == [0]


def test_an_error_of_the_source_is_raised_where_it_is_read():
    def source():
        yield 1
        raise OSError("a lost disk")

    items = ReadAhead(source())
    items.advance()
    assert next(items) == 1
    with pytest.raises(OSError, match="a lost disk"):
        items.advance()
