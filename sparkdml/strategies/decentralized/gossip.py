"""D-PSGD: every worker has a model of its own and averages it with its neighbours' in each step.

x_i(t+1) = sum_j W_ij x_j(t) - step(gradient of rank i at x_i(t)), with W doubly stochastic (Lian et
al. 2017, "Can decentralized algorithms outperform centralized algorithms?", arXiv 1705.09056). The
parameters travel while the gradient is computed; nothing of a model's size goes to all ranks. A few
numbers do (rows, loss, votes), by an allreduce, so that all ranks count and end alike.

A graph says which ranks are neighbours. The weights are those of Metropolis and Hastings (Xiao,
Boyd and Lall 2005): an edge counts 1 / (1 + the larger degree of its ends), and what is left of a
row stays with the rank itself. So the matrix is symmetric and doubly stochastic for any graph, and
mixing never changes the average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdml.checkpoint.state import State
from sparkdml.comm.base import PointToPoint, Work
from sparkdml.comm.peers import messages_of, open_peers
from sparkdml.errors import ParameterError
from sparkdml.runtime.protocol.plan import Role
from sparkdml.strategies.base import Strategy, check_backend
from sparkdml.strategies.replicas import (
    CONSENSUS_DISTANCE,
    Replicas,
    make_alike,
    refuse_gradient_monitor,
)
from sparkdml.training.task import Totals
from sparkdml.training.training import Training, TrainingPlan

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


class Gossip(Strategy):
    """Average with the neighbours in a graph, in every step; the model is the average over ranks.

    How far the replicas are from their average is in the history, as `consensus_distance`.

    Args:
        graph: "ring", "random", "complete" (every rank averages with all others), or the pairs of
            ranks that talk to each other.
        degree: about how many neighbours each rank has in a random graph; 4 unless given.
        seed: of the random graph.
        backend: "horovod", "torch", "mpi", or "auto", as in `AllReduce`. Neighbours' messages
            go by torch.
    """

    is_synchronous = True
    columns = (CONSENSUS_DISTANCE,)

    def __init__(
        self, graph: Graph = "ring", degree: int | None = None, seed: int = 0, backend: str = "auto"
    ) -> None:
        if isinstance(graph, str) and graph not in GRAPHS:
            allowed = f"one of {', '.join(map(repr, GRAPHS))}, or pairs of ranks"
            raise ParameterError("graph", graph, allowed)
        if degree is not None and graph != "random":
            raise ParameterError("degree", degree, "left out unless graph is 'random'")
        if degree is not None and degree < 2:
            raise ParameterError("degree", degree, "at least 2")
        self.graph, self.degree, self.seed = graph, degree, seed
        self.backend = check_backend(backend)

    def roles(self, num_workers: int) -> list[Role]:
        check_edges(self._edges(num_workers), num_workers)
        return [Role("worker", num_workers)]

    def _edges(self, size: int) -> set[tuple[int, int]]:
        return edges_of(self.graph, size, 4 if self.degree is None else self.degree, self.seed)

    def check(self, plan: TrainingPlan) -> None:
        refuse_gradient_monitor(self, plan)

    def run(self, role: str, training: Training) -> None:
        task, clock, comm = training.task, training.clock, training.ctx.comm
        make_alike(task, comm)
        self._replicas = Replicas(training)
        with open_peers(comm) as peers:
            mixer = Mixer(
                task.params.values, messages_of(peers), comm.rank, self._matrix(comm.size)
            )
            for epoch in training.epochs(self):
                for batch in epoch:
                    mixer.start()
                    task.grad(batch)
                    clock.lap("compute")
                    own, totals = task.totals(), self._add_up(training)
                    mixer.wait()
                    clock.lap("communication")
                    training.spans.lap("communication")
                    if not epoch.count(totals):
                        break  # no rank had a row left
                    mixer.mix()
                    task.apply(own)
                    training.spans.lap("optimizer")
                    epoch.tick()
                epoch.measured[CONSENSUS_DISTANCE] = self._replicas.judge_average()

    def _matrix(self, size: int) -> list[list[float]]:
        weights: list[list[float]] = mixing_matrix(self._edges(size), size).tolist()
        return weights

    def _add_up(self, training: Training) -> Totals:
        stats = training.task.params.stats.clone()
        return training.task.totals(training.ctx.comm.allreduce_(stats))

    def state(self) -> State:
        return self._replicas.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._replicas.load(state)

    def __repr__(self) -> str:
        # A run may only go on over the same graph, so all that makes it one is in here.
        if not isinstance(self.graph, str):
            return f"Gossip({sorted(tuple(sorted(pair)) for pair in self.graph)})"
        degree = "" if self.degree is None else f", degree={self.degree}"
        seed = f", seed={self.seed}" if self.graph == "random" else ""
        return f"Gossip({self.graph!r}{degree}{seed})"


class Mixer:
    """Sends this rank's parameters to its neighbours, and averages theirs with its own."""

    def __init__(
        self, values: Tensor, messages: PointToPoint, rank: int, matrix: list[list[float]]
    ) -> None:
        self._values, self._messages = values, messages
        self._own_weight = matrix[rank][rank]
        self._weights = {r: w for r, w in enumerate(matrix[rank]) if w and r != rank}
        # By way of the host's memory: messages on GPUs would need an order of their own.
        self._incoming = {r: torch.empty_like(values, device="cpu") for r in self._weights}
        self._works: list[Work] = []

    def start(self) -> None:
        """The parameters must stay as they are until `wait` returns."""
        if not self._weights:
            return
        outgoing = self._values.cpu()  # the same tensor, if it is there already
        self._works = [
            *(self._messages.irecv_(tensor, rank) for rank, tensor in self._incoming.items()),
            *(self._messages.isend(outgoing, rank) for rank in self._incoming),
        ]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []

    def mix(self) -> None:
        if not self._weights:
            return
        self._values.mul_(self._own_weight)
        for rank, weight in self._weights.items():  # in rank order: the same bits each time
            self._values.add_(self._incoming[rank].to(self._values.device), alpha=weight)
