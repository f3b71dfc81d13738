"""The order of rows: a permutation, and the same for any split of the shards among workers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.feed.order import (
    NUM_SHARDS,
    argsort_keys,
    owner_of,
    row_keys,
    shard_of,
    window_order,
    windows,
)

layouts = st.dictionaries(st.integers(0, NUM_SHARDS - 1), st.integers(1, 50), max_size=30)


def rows_in_order(layout, seed, epoch, max_rows):
    """(shard, index within it) of each row, in the order in which one worker reads them."""
    shards = np.array(list(layout), dtype=np.int64)
    counts = np.array(list(layout.values()), dtype=np.int64)
    starts = np.cumsum(counts) - counts
    names = [(s, i) for s, c in layout.items() for i in range(c)]
    order = [
        window_order(seed, epoch, shards, starts, counts, window)
        for window in windows(seed, epoch, shards, counts, max_rows)
    ]
    return [names[row] for part in order for row in part]


@given(layouts, st.integers(0, 2**63), st.integers(0, 100), st.integers(1, 200))
def test_each_row_comes_once(layout, seed, epoch, max_rows):
    order = rows_in_order(layout, seed, epoch, max_rows)
    assert sorted(order) == sorted((s, i) for s, c in layout.items() for i in range(c))


@given(layouts, st.integers(2, 5), st.integers(1, 200), st.integers(1, 200))
def test_a_shards_own_order_does_not_depend_on_who_reads_it(layout, workers, window_a, window_b):
    alone = rows_in_order(layout, 7, 3, window_a)
    for rank in range(workers):
        own = {s: c for s, c in layout.items() if owner_of(s, workers) == rank}
        for shard in own:
            among_few = [row for row in rows_in_order(own, 7, 3, window_b) if row[0] == shard]
            assert among_few == [row for row in alone if row[0] == shard]


def test_epochs_and_seeds_differ():
    layout = {5: 200}
    orders = [
        tuple(rows_in_order(layout, seed, epoch, 10**6)) for seed in (1, 2) for epoch in (1, 2)
    ]
    assert len(set(orders)) == 4


def test_shuffling_is_even():
    """Over many epochs every row stands everywhere: the mean place is the middle."""
    places = np.zeros(100)
    for epoch in range(1, 401):
        for place, (_, index) in enumerate(rows_in_order({9: 100}, 3, epoch, 10**6)):
            places[index] += place
    assert np.abs(places / 400 - 49.5).max() < 6.5  # four and a half standard errors


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_argsort_is_stable(keys):
    array = np.array(keys, dtype=np.uint32)
    assert argsort_keys(array).tolist() == np.argsort(array, kind="stable").tolist()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_shards_are_ranges_of_hashes(hashes):
    ordered = np.sort(np.array(hashes, dtype=np.int64).view(np.uint64)).view(np.int64)
    shards = shard_of(ordered)
    assert (np.diff(shards) >= 0).all()
    assert shards.min() >= 0
    assert shards.max() < NUM_SHARDS


def test_windows_are_bounded_unless_a_shard_is_larger():
    shards, counts = np.arange(50), np.full(50, 10)
    counts[7] = 500
    sizes = [int(counts[w].sum()) for w in windows(1, 1, shards, counts, 64)]
    assert sorted(sizes)[-1] == 500
    assert all(size <= 64 for size in sizes if size < 500)


def test_keys_use_the_whole_range():
    keys = row_keys(1, 1, np.zeros(10_000, dtype=np.int64), np.arange(10_000))
    assert len(np.unique(keys)) > 9_980
    assert keys.max() > 0.99 * 2**32
