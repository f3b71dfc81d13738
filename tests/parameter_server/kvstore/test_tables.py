"""Array, matrix and sparse tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.kvstore.tables import ArrayTable, MatrixTable, SparseTable, add_up
from sparkdml.testing.server_cluster import run_workers


def test_all_workers_add_to_an_array():
    def work(comm, store):
        table = ArrayTable(store, "counts", 4)
        table.add(np.arange(4) * (comm.rank + 1))
        table.add_async(np.ones(4)).wait()
        store.barrier()
        ticket = table.get_async()
        found = ticket.wait()
        assert ticket.done
        return found.tolist(), table.get().tolist()

    expected = [2.0, 5.0, 8.0, 11.0]
    assert run_workers(2, work) == [(expected, expected)] * 2


def test_rows_are_lent_and_their_changes_added():
    def work(comm, store):
        table = MatrixTable(store, "factors", 6, 2)
        rows = np.array([5, comm.rank])
        with table.hold(rows) as held:
            assert held.tolist() == [[0.0, 0.0]] * 2
            comm.barrier()  # both hold row 5 at the same time
            held += comm.rank + 1
            assert table.rows_held == 2
            table.get(np.array([2]))
        assert table.rows_held == 0
        comm.barrier()
        blocks = [part for _, part in table.blocks(4)]
        assert [len(part) for part in blocks] == [4, 2]
        return np.concatenate(blocks)[:, 0].tolist()

    assert run_workers(2, work) == [[1.0, 2.0, 0.0, 0.0, 0.0, 3.0]] * 2


def test_rows_that_are_held_are_counted_and_limited():
    def work(comm, store):
        table = MatrixTable(store, "factors", 6, 2, max_rows_held=4)
        with table.hold(np.arange(3)):
            table.get(np.array([5]))
            with pytest.raises(ParameterError, match="at most 4 at once but got"):
                table.get(np.array([4, 5]))
        assert (table.rows_held, table.most_rows_held) == (0, 4)

    run_workers(1, work)


def test_after_an_exception_nothing_is_added():
    def fail(table):
        with table.hold(np.arange(2)) as held:
            held += 1
            raise KeyError

    def work(comm, store):
        table = MatrixTable(store, "factors", 2, 1)
        with pytest.raises(KeyError):
            fail(table)
        assert table.rows_held == 0
        return table.get(np.arange(2)).tolist()

    assert run_workers(1, work) == [[[0.0], [0.0]]]


def test_a_sparse_table_sends_sums_and_no_zeros():
    def work(comm, store):
        table = SparseTable(store, "clicks", 1_000, width=2)
        keys = np.array([7, 999, 7, 3, 3])
        table.add(keys, np.array([[1, 2], [3, 4], [5, 6], [1, 1], [-1, -1]]))
        table.add(np.array([3]), np.zeros((1, 2)))  # nothing to send at all
        return table.rows_sent, table.get(np.array([999, 3, 7, 999])).tolist()

    assert run_workers(1, work, num_servers=2) == [(2, [[3, 4], [0, 0], [6, 8], [3, 4]])]


@settings(deadline=None, max_examples=40)
@given(
    keys=arrays(np.int64, st.integers(0, 20), elements=st.integers(0, 6)),
    seed=st.integers(0, 100),
)
def test_adding_up_conserves_sums(keys, seed):
    values = np.random.default_rng(seed).integers(-2, 3, (len(keys), 2)).astype(np.float32)
    rows, sums = add_up(keys, values)
    assert len(set(rows)) == len(rows)
    assert sums.any(axis=1).all()
    expected, found = np.zeros((7, 2)), np.zeros((7, 2))
    np.add.at(expected, keys, values)
    found[rows] = sums
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda store: ArrayTable(store, "t", 0), "size"),
        (lambda store: MatrixTable(store, "t", 0, 1), "num_rows"),
        (lambda store: MatrixTable(store, "t", 1, 0), "width"),
        (lambda store: MatrixTable(store, "t", 1, 1, max_rows_held=0), "max_rows_held"),
        (lambda store: SparseTable(store, "t", 0), "num_keys"),
        (lambda store: ArrayTable(store, "t", 3).add(np.ones(2)), "delta"),
        (lambda store: MatrixTable(store, "t", 3, 2).add(np.arange(2), np.ones((2, 3))), "delta"),
        (lambda store: SparseTable(store, "t", 3).add(np.arange(2), np.ones((2, 3))), "values"),
    ],
)
def test_bad_arguments(make, word):
    with pytest.raises(ParameterError, match=word):
        run_workers(1, lambda comm, store: make(store))
