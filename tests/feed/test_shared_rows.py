"""Rows of one worker read by another: in the owner's order, from its files or over the wire."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.comm.base import Traffic
from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.feed.epoch_order import BatchRequest
from sparkdml.feed.feed import Chunk, Feed, FeedPlan
from sparkdml.feed.ragged import RaggedArray
from sparkdml.feed.shared_rows import SharedRows
from sparkdml.feed.shared_spool import RemoteRows, RowServer, open_here
from sparkdml.network.timeouts import Timeouts


def make_feed(folder, num_rows, seed=0, **plan):
    """Rows with their number as content; a ragged column has as many elements as its last digit."""
    rng = np.random.default_rng(seed)
    hashes = np.sort(rng.integers(-(2**63), 2**63 - 1, num_rows, dtype=np.int64))
    rows = np.arange(num_rows) + 1000 * seed
    columns = {
        "id": rows,
        "x": np.stack([rows, rows], axis=1).astype(np.float32),
        "words": RaggedArray.of_lengths(np.repeat(rows, rows % 10), rows % 10),
    }
    chunks = [Chunk(columns, hashes)] if num_rows else []
    return Feed(iter(chunks), FeedPlan((), seed=3, **plan), str(folder))


def ids(arrays):
    assert np.array_equal(arrays["x"][:, 1], arrays["id"].astype(np.float32))
    words = arrays["words"]
    assert np.array_equal(words.values, np.repeat(arrays["id"], words.lengths))
    assert np.array_equal(words.lengths, arrays["id"] % 10)
    return arrays["id"].tolist()


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(0, 200),
    window_rows=st.integers(1, 150),
    epoch=st.integers(0, 2),
    done=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_places_are_those_of_the_owner(tmp_path_factory, num_rows, window_rows, epoch, done, cuts):
    folder = tmp_path_factory.mktemp("spool")
    feed = make_feed(
        folder, num_rows, max_window_rows=window_rows, collate=lambda batch: {"id": batch["id"]}
    )
    shared = SharedRows(feed, rank=0, key="k")
    position = None
    if done:
        position = feed.position_after(min(done, num_rows), BatchRequest(1, epoch))
    expected = [
        i for b in feed.batches(BatchRequest(7, epoch, position=position)) for i in b["id"].tolist()
    ]
    order = shared.order(0, epoch, True, position)
    assert order.num_rows == len(expected)
    borders = [0, *sorted(min(c, len(expected)) for c in cuts), len(expected)]
    found = []
    for start, stop in pairwise(borders):
        if start < stop:
            found += ids(shared.take_pieces([order], [(0, start, stop)]))
    assert found == expected
    shared.close()
    feed.close()


@pytest.mark.parametrize("maps", [True, False])
def test_another_workers_rows(tmp_path, maps):
    owners = [make_feed(tmp_path, n, seed) for seed, n in enumerate([60, 0, 45])]
    views = [SharedRows(feed, rank, "key", maps) for rank, feed in enumerate(owners)]
    traffic = Traffic()
    if not maps:
        for view in views:
            view.serve("127.0.0.1", traffic)
    for view in views:
        for owner, other in enumerate(views):
            assert view.introduce(owner, other.card)
    for view in views:
        orders = [view.order(owner, 1, True) for owner in range(3)]
        assert [order.num_rows for order in orders] == [60, 0, 45]
        pieces = [(0, 50, 60), (2, 0, 45), (0, 0, 50)]
        found = ids(view.take_pieces(orders, pieces))
        assert sorted(found) == [*range(60), *range(2000, 2045)]
        assert found == ids(views[0].take_pieces(orders, pieces))
    assert (traffic.bytes == 0) == maps
    for view in views:
        view.close()
    for feed in owners:
        feed.close()


def test_what_is_not_the_owners_file_is_not_mapped(tmp_path):
    feed = make_feed(tmp_path, 20)
    shared = SharedRows(feed, 0, "key")
    card = shared.card
    mapped = open_here(card)
    mapped.close()
    for change in (
        {"pid": 2**22 + 1},
        {"files": [[f, device, inode + 1, size] for f, device, inode, size in card["files"]]},
        {"files": [[f, device, inode, size + 1] for f, device, inode, size in card["files"]]},
    ):
        assert open_here({**card, **change}) is None
    other = SharedRows(feed, 1, "key", maps=False)
    assert not other.introduce(0, card)
    with pytest.raises(CommunicationError, match="can't be reached"):
        other.take(0, np.arange(3))
    shared.close()
    other.close()
    feed.close()


def test_strangers_and_bad_questions_are_turned_away(tmp_path):
    feed = make_feed(tmp_path, 20)
    shared = SharedRows(feed, 0, "key")
    server = RowServer(feed.training_spool, "127.0.0.1", "key", Timeouts())
    with pytest.raises(CommunicationError, match=r"can't be read: .* another token"):
        RemoteRows(shared.card, server.address, "another key", Timeouts())
    for question in (
        struct.pack("!I", 0),
        struct.pack("!I", 2**32 - 1),
        struct.pack("!I", 1) + struct.pack("<q", 20),
        struct.pack("!I", 1) + struct.pack("<q", -1),
    ):
        rows = RemoteRows(shared.card, server.address, "key", Timeouts())
        rows._connection.send_bytes(question)
        with pytest.raises(ConnectionError):
            rows._connection.receive_bytes(1)
        rows.close()
    rows = RemoteRows(
        shared.card, server.address, "key", Timeouts()
    )  # others are served all the same
    assert ids(rows.take(np.array([3, 1, 19]))) == [3, 1, 19]
    server.close()
    with pytest.raises(CommunicationError, match="can't be read"):
        rows.take(np.array([1]))
    rows.close()
    shared.close()
    feed.close()


def test_an_owner_that_restarted_is_read_again(tmp_path):
    feed, again = make_feed(tmp_path, 20), make_feed(tmp_path, 20)
    reader = SharedRows(make_feed(tmp_path, 0), 1, "key")
    for owner in (feed, again):
        reader.introduce(0, SharedRows(owner, 0, "key").card)
        owner.close()  # the reader's map outlives it
        assert ids(reader.take(0, np.arange(20))) == [*range(20)]
    reader.close()


def test_rows_that_are_drawn_can_not_move(tmp_path):
    feed = make_feed(tmp_path, 0, sampling="w")
    with pytest.raises(ParameterError, match="samplingCol"):
        SharedRows(feed, 0, "key")
    feed.close()
