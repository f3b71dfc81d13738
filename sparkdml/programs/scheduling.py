"""Which parameters may be changed at the same time: pure functions for `schedule`.

Rotation: there are as many blocks as workers, and in each round every worker has a different one
(the strata of Gemulla et al. 2011, "Large-scale matrix factorization with distributed stochastic
gradient descent"). Dynamic: parameters are drawn by how far they moved recently, and those that
depend too much on one drawn before them wait (Lee et al. 2014, STRADS).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CROWDED = 0.5


def rotate(worker: int, round: int, num_blocks: int) -> int:
    """Return a worker's block in a round; it has each block once in `num_blocks` rounds."""
    return (worker + round) % num_blocks


def block_of(indices: Ints, num_blocks: int) -> Ints:
    """Return each index's block: round-robin, since neighbouring indices are often similar."""
    return indices % num_blocks


def rows_of_block(block: int, num_blocks: int, num_rows: int) -> Ints:
    return np.arange(block, num_rows, num_blocks, dtype=np.int64)


def place_in_block(indices: Ints, num_blocks: int) -> Ints:
    """Return the position of each index in `rows_of_block` of its own block."""
    return indices // num_blocks


def draw(priorities: Floats, count: int, dice: np.random.Generator) -> Ints:
    """Draw `count` different indices in proportion to their priorities, in the order of drawing.

    The largest values of log(priority) plus Gumbel noise are a draw without replacement (Efraimidis
    and Spirakis 2006).
    """
    keys = np.log(priorities) + dice.gumbel(size=len(priorities))
    count = min(count, len(keys))
    drawn = np.argpartition(-keys, count - 1)[:count]
    return drawn[np.argsort(-keys[drawn])]


def independent(gram: Floats, threshold: float, most: int) -> Ints:
    """Choose up to `most` columns, given their products, that may be changed at the same time.

    Greedy, in order: a column waits if it correlates at `threshold` or more with one chosen before
    it. It also waits if the correlations of any chosen column would add up to `CROWDED`: below that
    the products are less than one and a half times their diagonal, so changing all columns at once
    improves the objective by at least half of the sum of their separate improvements.
    """
    norms = np.sqrt(np.diag(gram))
    norms[norms == 0] = 1.0  # a column of zeros depends on nothing
    correlation = np.abs(gram) / np.outer(norms, norms)
    chosen: list[int] = []
    sums = np.zeros(len(gram))  # of each column's correlations with those chosen
    for candidate in range(len(gram)):
        if len(chosen) == most:
            break
        with_chosen = correlation[candidate, chosen]
        if (with_chosen >= threshold).any() or sums[candidate] >= CROWDED:
            continue
        if (sums[chosen] + with_chosen >= CROWDED).any():
            continue
        chosen.append(candidate)
        sums += correlation[:, candidate]
        sums[candidate] -= correlation[candidate, candidate]
    return np.asarray(chosen, dtype=np.int64)


def disjoint_batches(*columns: Ints) -> list[Ints]:
    """Cut all entries into batches in which no value of any column occurs twice.

    No two entries of a batch change the same values, so processing a batch at once equals
    processing its entries one by one, in any order. Each entry goes into the first batch that has
    none of its values (a greedy edge colouring): with two columns there are fewer than twice as
    many batches as the most frequent value has entries, and usually hardly more than that.
    """
    # A bit for each batch that already has the value: Python's integers have unlimited length.
    seen = [[0] * (int(column.max(initial=-1)) + 1) for column in columns]
    batch_of = np.empty(len(columns[0]), dtype=np.int64)
    for entry, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        taken = 0
        for masks, value in zip(seen, values, strict=True):
            taken |= masks[value]
        free = ~taken & (taken + 1)
        for masks, value in zip(seen, values, strict=True):
            masks[value] |= free
        batch_of[entry] = free.bit_length() - 1
    order = np.argsort(batch_of, kind="stable")
    borders = np.cumsum(np.bincount(batch_of))[:-1]
    return np.split(order, borders) if len(order) else []
