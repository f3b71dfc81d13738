"""What a worker must know to read its rows, and the form in which rows come in.

The driver makes a FeedPlan (see planning.py); it is immutable and is shipped to every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from sparkdml.feed.columns.base import Column
from sparkdml.feed.order import Ints
from sparkdml.feed.ragged import Collate, RaggedArray
from sparkdml.feed.strata import Strata

Arrays = dict[str, np.ndarray | RaggedArray]
Preprocess = Callable[[pa.RecordBatch], Mapping[str, Any]]
Augment = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Chunk:
    """Some rows on their way in: as arrays, with the hashes that place them."""

    columns: Arrays
    hashes: Ints
    held_out: np.ndarray | None = None  # which rows are known to be for validation
    draws: np.ndarray | None = None  # of the sampling column: how often, in proportion


@dataclass(frozen=True)
class FeedPlan:
    """What the worker must know to read its rows."""

    columns: tuple[Column, ...]  # that become tensors as they are
    seed: int = 0
    validation: float | str | None = None  # a fraction of the rows, or a boolean column
    max_window_rows: int = 1 << 20  # 8 bytes a row for the permutation, three times while sorting
    max_window_bytes: int = 256 << 20  # of the page cache, which a window should fit
    inputs: tuple[Column, ...] = ()  # that preprocess is given
    preprocess: Preprocess | None = None  # once a row, before the spool
    collate: Collate | None = None  # for each batch, in training and inference
    augment: Augment | None = None  # for each batch that is trained on
    floating: str | None = None  # the floating-point type of what preprocess returns
    required: tuple[str, ...] = ()  # columns that every batch must have
    sampling: str | None = None  # a column: how often a row is drawn, in proportion
    stratify: str | None = None  # a column: the fraction is held out within each of its values
    strata: Strata | None = None  # what the driver found out about them
    drop_last: bool = False
    check_finite: bool = False

    @property
    def reads_all_first(self) -> bool:
        """Whether every row must have been read before the first batch is handed out.

        What only the user's function or a look at every number can tell must be known before the
        first step, and how often a row is drawn depends on the weights of all the others.
        """
        return self.preprocess is not None or self.check_finite or self.sampling is not None

    def known(self, names: Sequence[str]) -> tuple[Column, ...]:
        """Those of these columns that the DataFrame has; others are made of them."""
        columns = {column.name: column for column in self.columns}
        return tuple(columns[name] for name in names if name in columns)


def is_validation(hashes: Ints, fraction: float) -> np.ndarray:
    """Which rows a fraction holds out: decided by the low bits, which no shard depends on."""
    return (hashes & 0xFFFFFF) < round(fraction * (1 << 24))
