"""Mixing matrices: doubly stochastic, and they do mix, for any connected graph."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.errors import ParameterError
from sparkdml.strategies.decentralized.gossip import (
    check_edges,
    edges_of,
    mixing_matrix,
    neighbours,
    spectral_gap,
)


@st.composite
def connected_graphs(draw):
    """A random tree and some more edges."""
    size = draw(st.integers(1, 12))
    tree = {(draw(st.integers(0, rank - 1)), rank) for rank in range(1, size)}
    pairs = [(a, b) for b in range(size) for a in range(b)]
    more = draw(st.lists(st.sampled_from(pairs), max_size=20)) if pairs else []
    return tree | set(more), size


@settings(deadline=None, max_examples=80)
@given(connected_graphs())
def test_doubly_stochastic_with_a_spectral_gap(graph):
    edges, size = graph
    check_edges(edges, size)
    matrix = mixing_matrix(edges, size)
    np.testing.assert_allclose(matrix.sum(axis=0), 1)
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    assert (matrix >= 0).all()
    assert spectral_gap(matrix) > 1e-9
    for rank in range(size):
        talks = np.flatnonzero(matrix[rank]).tolist()
        assert [r for r in talks if r != rank] == neighbours(edges, rank)


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 40), degree=st.integers(2, 8), seed=st.integers(0, 99))
def test_random_graphs_are_connected_and_the_same_everywhere(size, degree, seed):
    edges = edges_of("random", size, degree, seed)
    check_edges(edges, size)
    assert edges == edges_of("random", size, degree, seed)
    degrees = [len(neighbours(edges, rank)) for rank in range(size)]
    assert all(min(2, size - 1) <= d <= min(degree + degree % 2, size - 1) for d in degrees)


def test_known_matrices():
    np.testing.assert_allclose(mixing_matrix(edges_of("complete", 5), 5), np.full((5, 5), 0.2))
    ring = mixing_matrix(edges_of("ring", 6), 6)
    np.testing.assert_allclose(ring[2], [0, 1 / 3, 1 / 3, 1 / 3, 0, 0])
    # The eigenvalues of a circulant: (1 + 2 cos(2 pi k / n)) / 3.
    assert spectral_gap(ring) == pytest.approx(1 - (1 + 2 * np.cos(2 * np.pi / 6)) / 3)
    random = mixing_matrix(edges_of("random", 64, 4), 64)
    assert spectral_gap(random) > 10 * spectral_gap(mixing_matrix(edges_of("ring", 64), 64))


@pytest.mark.parametrize("edges", [{(0, 1)}, {(0, 1), (1, 3), (2, 2)}, {(0, 1), (1, 2), (1, 9)}])
def test_graphs_that_are_refused(edges):
    with pytest.raises(ParameterError, match="graph"):
        check_edges(edges, 4)
