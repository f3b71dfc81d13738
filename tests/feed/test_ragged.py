"""Rows of different lengths: through the spool, into batches, and padded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import sparkdml as dml
from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.ragged import Ragged, RaggedArray

row_lengths = st.lists(st.integers(0, 6), max_size=30)


def ragged_of(rows):
    """Row i holds its number as often as `rows` says."""
    lengths = np.array(rows, dtype=np.int64)
    return RaggedArray.of_lengths(np.repeat(np.arange(len(rows)), lengths), lengths)


def as_lists(ragged):
    return [part.tolist() for part in np.split(ragged.values, ragged.offsets[1:-1])][: len(ragged)]


@settings(deadline=None)
@given(row_lengths, st.data())
def test_choosing_rows_equals_choosing_from_a_list(rows, data):
    ragged = ragged_of(rows)
    lists = [[i] * n for i, n in enumerate(rows)]
    assert as_lists(ragged) == lists
    start, stop = data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, 40))
    assert as_lists(ragged[start:stop]) == lists[start:stop]
    mask = data.draw(hnp.arrays(bool, len(rows)))
    assert as_lists(ragged[mask]) == [row for row, kept in zip(lists, mask, strict=True) if kept]
    cut = len(rows) // 2
    if rows:
        assert as_lists(RaggedArray.concatenate([ragged[:cut], ragged[cut:]])) == lists


def chunks_of(rows, chunk_rows):
    hashes = np.sort(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(rows)))
    ragged = ragged_of(rows)
    for start in range(0, len(rows), chunk_rows):
        part = slice(start, start + chunk_rows)
        yield Chunk({"id": np.arange(len(rows))[part], "x": ragged[part]}, hashes[part])


def kept_ragged(columns):
    """A collate function that lets tests see what it is given."""
    x = columns["x"]
    assert isinstance(x, Ragged)
    padded = x.pad(-1, 6)
    return {"padded": padded, "lengths": x.lengths}


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 6), max_size=120),
    chunk_rows=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    validation=st.sampled_from([None, 0.3]),
)
def test_every_row_keeps_its_elements(tmp_path_factory, rows, chunk_rows, batch_size, validation):
    plan = FeedPlan((), 3, validation, max_window_rows=50, collate=kept_ragged)
    feed = Feed(chunks_of(rows, chunk_rows), plan, str(tmp_path_factory.mktemp("spool")))
    for epoch in range(3):
        seen = []
        batches = [
            *feed.batches(BatchRequest(batch_size, epoch)),
            *feed.validation_batches(batch_size),
        ]
        for batch in batches:
            seen += batch["id"].tolist()
            assert batch["lengths"].tolist() == [rows[i] for i in batch["id"].tolist()]
            for i, row in zip(batch["id"].tolist(), batch["padded"].tolist(), strict=True):
                assert row == [i] * rows[i] + [-1] * (6 - rows[i])
        assert sorted(seen) == list(range(len(rows)))
    feed.close()


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_kept_spool_has_its_ragged_columns(tmp_path, epoch):
    told, rows = [], [3, 0, 2, 5, 1] * 20
    plan = FeedPlan((), 3, collate=kept_ragged)
    feed = Feed(chunks_of(rows, 30), plan, str(tmp_path), on_sealed=told.append)
    expected = [batch["padded"].clone() for batch in feed.batches(BatchRequest(16, epoch))]
    feed.close(keep=True)
    again = Feed.reopen(told[0], plan)
    found = [batch["padded"].clone() for batch in again.batches(BatchRequest(16, epoch))]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again.close()


def test_chunks_without_any_element_know_no_shape(tmp_path):
    def chunks():
        yield Chunk(
            {"x": RaggedArray(np.empty((0, 0), np.float32), np.zeros(4, int))}, np.arange(3)
        )
        full = RaggedArray.of_lengths(np.ones((4, 2), np.float32), np.array([1, 3]))
        yield Chunk({"x": full}, np.arange(3, 5))

    feed = Feed(chunks(), FeedPlan((), collate=dml.pad()), str(tmp_path))
    for epoch in (0, 1):
        (batch,) = feed.batches(BatchRequest(8, epoch))
        assert batch["x"].shape == (5, 3, 2)
        assert sorted(batch["x_length"].tolist()) == [0, 0, 0, 1, 3]
    feed.close()


# -- what users see -----------------------------------------------------------------------------


def make_ragged(rows, inner=()):
    lengths = torch.tensor([len(row) for row in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Ragged(torch.tensor([x for row in rows for x in row]).reshape(-1, *inner), offsets)


def test_rows_and_lengths():
    ragged = make_ragged([[1, 2], [], [3]])
    assert [row.tolist() for row in ragged.rows()] == [[1, 2], [], [3]]
    assert ragged.lengths.tolist() == [2, 0, 1]
    assert len(ragged) == ragged.num_rows == 3


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (None, [[1, 2, 3], [9, 9, 9], [4, 9, 9]]),
        (2, [[1, 2], [9, 9], [4, 9]]),
        (4, [[1, 2, 3, 9], [9, 9, 9, 9], [4, 9, 9, 9]]),
    ],
)
def test_pad_fills_and_cuts(length, expected):
    assert make_ragged([[1, 2, 3], [], [4]]).pad(9, length).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1), st.integers(1, 6))
def test_pad_equals_padding_row_by_row(rows, max_length):
    columns = {"x": make_ragged(rows), "y": torch.arange(len(rows))}
    padded = dml.pad(7, max_length)(columns)
    width = min(max(map(len, rows)), max_length)
    assert padded["x"].tolist() == [
        (row + [7] * 9)[: min(len(row), width)] + [7] * (width - len(row)) for row in rows
    ]
    assert padded["x_length"].tolist() == [min(len(row), max_length) for row in rows]
    assert padded["y"] is columns["y"]


def test_pad_takes_a_value_for_each_column():
    columns = {"a": make_ragged([[1], []]), "b": make_ragged([[], [2]])}
    padded = dml.pad({"a": -1})(columns)
    assert padded["a"].tolist() == [[1], [-1]]
    assert padded["b"].tolist() == [[0], [2]]


@pytest.mark.parametrize("arguments", [{"max_length": 0}, {"max_length": True}, {"value": "x"}])
def test_pad_refuses_what_it_cannot_use(arguments):
    with pytest.raises(ParameterError, match=next(iter(arguments))):
        dml.pad(**arguments)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda columns: columns, "left column 'x' ragged"),
        (lambda columns: {"x": columns["x"].values}, "first dimension is the 5 rows"),
        (lambda columns: [1], "returned a list"),
        (lambda columns: {"x": columns["missing"]}, "collate failed on a batch of 5 rows"),
    ],
)
def test_words_for_a_collate_that_is_wrong(tmp_path, collate, words):
    feed = Feed(chunks_of([1, 2, 0, 3, 1], 5), FeedPlan((), collate=collate), str(tmp_path))
    with pytest.raises(DataError, match=words):
        next(feed.batches(BatchRequest(5)))
    feed.close()
