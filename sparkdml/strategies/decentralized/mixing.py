"""Graphs and mixing matrices: which ranks average with each other, and with which weights. Pure.

The weights are those of Metropolis and Hastings (Xiao, Boyd and Lall 2005): an edge counts
1 / (1 + the larger degree of its ends), and what is left of a row stays with the rank itself. So
the matrix is symmetric and doubly stochastic for any graph, and mixing never changes the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from sparkdml.errors import ParameterError

Edge = tuple[int, int]
Graph = Literal["ring", "random", "complete"] | Sequence[Edge]
Matrix = npt.NDArray[np.float64]

GRAPHS = ("ring", "random", "complete")


def edges_of(graph: Graph, size: int, degree: int = 4, seed: int = 0) -> set[Edge]:
    """The edges among `size` ranks, each once, the smaller rank first.

    A random graph is a union of random cycles through all ranks: connected, every rank with about
    `degree` neighbours, and mixing much faster than a ring of as many ranks.
    """
    if graph == "complete":
        return {(a, b) for b in range(size) for a in range(b)}
    if graph == "ring":
        return _cycle(list(range(size)))
    if graph == "random":
        generator = np.random.default_rng([seed, size])
        cycles = [generator.permutation(size).tolist() for _ in range(-(-degree // 2))]
        return set().union(*(_cycle(cycle) for cycle in cycles))
    assert not isinstance(graph, str)
    return {(min(a, b), max(a, b)) for a, b in graph}


def _cycle(ranks: list[int]) -> set[Edge]:
    pairs = zip(ranks, ranks[1:] + ranks[:1], strict=True)
    return {(min(a, b), max(a, b)) for a, b in pairs if a != b}


def check_edges(edges: set[Edge], size: int) -> None:
    """Every edge between two of the ranks, and a way from each rank to each other one."""
    for edge in edges:
        if not 0 <= edge[0] < edge[1] < size:
            raise ParameterError("graph", edge, f"pairs of different ranks from 0 to {size - 1}")
    reached, found = {0}, {0}
    while found:
        found = {b for edge in edges for a, b in (edge, edge[::-1]) if a in found} - reached
        reached |= found
    if len(reached) < size:
        missing = sorted(set(range(size)) - reached)
        raise ParameterError(
            "graph", sorted(edges), f"connected: no way leads from rank 0 to {missing}"
        )


def neighbours(edges: set[Edge], rank: int) -> list[int]:
    return sorted(b for edge in edges for a, b in (edge, edge[::-1]) if a == rank)


def mixing_matrix(edges: set[Edge], size: int) -> Matrix:
    """How much of each rank's replica goes into each: row i is rank i's new replica."""
    degrees = [len(neighbours(edges, rank)) for rank in range(size)]
    matrix = np.zeros((size, size))
    for a, b in edges:
        matrix[a, b] = matrix[b, a] = 1.0 / (1 + max(degrees[a], degrees[b]))
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    return matrix


def spectral_gap(matrix: Matrix) -> float:
    """1 less the second largest eigenvalue by size: how much of the disagreement a step removes."""
    if len(matrix) == 1:
        return 1.0
    sizes = np.sort(np.abs(np.linalg.eigvalsh(matrix)))
    return float(1.0 - sizes[-2])
