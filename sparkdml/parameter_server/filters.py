"""Filters: which part of an update is sent now (Li et al. 2014, OSDI; Hsieh et al. 2017, NSDI).

A filter decides row by row (in a table without rows: element by element). What isn't sent is held
back and added to the next update, so that nothing is lost in the long run. Half precision and the
caching of keys, which change only how things are sent, are settings of the wire: `half` in
`ServerConfig`, and the signatures of lists of rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparkdml.errors import ParameterError
from sparkdml.parameter_server.partition import Indexes


@dataclass(frozen=True)
class Filter(ABC):
    """A rule for all tables of a client."""

    needs_values = False  # whether it compares updates with the values last read

    @abstractmethod
    def choose(self, updates: Tensor, values: Tensor | None) -> Tensor:
        """Return a mask of the rows of `updates` (rows, width) to send; `values` are the rows'."""


@dataclass(frozen=True)
class Significant(Filter):
    """Rows whose update is larger than `threshold` of the row itself: significantly modified."""

    needs_values = True
    threshold: float = 0.01

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ParameterError("threshold", self.threshold, "at least 0")

    def choose(self, updates: Tensor, values: Tensor | None) -> Tensor:
        change = sizes_of(updates)
        if values is None:
            return change.gt(0)  # never read: nothing to compare with
        return change.gt(self.threshold * sizes_of(values))


@dataclass(frozen=True)
class Largest(Filter):
    """The rows with the largest updates, as many as `fraction` of those that are held."""

    fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ParameterError("fraction", self.fraction, "more than 0 and at most 1")

    def choose(self, updates: Tensor, values: Tensor | None) -> Tensor:
        size = sizes_of(updates)
        count = min(len(size), math.ceil(self.fraction * len(size)))
        mask = torch.zeros(len(size), dtype=torch.bool)
        mask[torch.topk(size, count).indices] = True
        return mask.logical_and_(size > 0)


def sizes_of(rows: Tensor) -> Tensor:
    """The Euclidean length of each row."""
    sizes: Tensor = torch.linalg.vector_norm(rows.double(), dim=1)
    return sizes


class Residual:
    """The updates of one table that have not been sent yet: some rows, each with its sum."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.rows: Indexes = np.empty(0, dtype=np.int64)
        self.sums = torch.empty((0, width), dtype=dtype)

    def add(self, rows: Indexes, updates: Tensor) -> None:
        """Add updates of ascending `rows`."""
        if np.array_equal(rows, self.rows):
            self.sums = self.sums + updates
            return
        if _is_stretch_around(rows, self.rows):  # a dense push: nothing to merge
            sums = updates.to(self.sums.dtype, copy=True)
            sums[torch.from_numpy(self.rows - rows[0])] += self.sums
            self.rows, self.sums = rows, sums
            return
        merged = np.union1d(self.rows, rows)
        sums = torch.zeros((len(merged), self.sums.shape[1]), dtype=self.sums.dtype)
        sums[torch.from_numpy(np.searchsorted(merged, self.rows))] = self.sums
        sums.index_add_(0, torch.from_numpy(np.searchsorted(merged, rows)), updates)
        self.rows, self.sums = merged, sums

    def take(self, mask: Tensor) -> tuple[Indexes, Tensor]:
        """Remove the chosen rows, and return them with their sums."""
        chosen, kept = mask.numpy(), (~mask).numpy()
        taken = self.rows[chosen], self.sums[mask]
        self.rows, self.sums = self.rows[kept], self.sums[~mask]
        return taken


def _is_stretch_around(rows: Indexes, others: Indexes) -> bool:
    """Whether ascending `rows` have no gap, and the ascending others lie among them."""
    if not len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        return False
    return not len(others) or bool(rows[0] <= others[0] and others[-1] <= rows[-1])
