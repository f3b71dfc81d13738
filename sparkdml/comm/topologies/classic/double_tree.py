"""Two binary trees, each for one half of the tensor: who is inside one is a leaf of the other.

A single tree leaves its leaves' links idle on the way down, and half of all ranks are leaves. Here
every rank sends about as much as any other: 2(n-1)/n · S on average, and in log2(n) depth.
(Sanders, Speck and Träff 2009; in NCCL since 2.4.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdml.comm.base import PointToPoint
from sparkdml.comm.topologies.base import Combine
from sparkdml.comm.topologies.tree import Place, along_trees


def double_tree(
    messages: PointToPoint, rank: int, size: int, tensor: Tensor, combine: Combine
) -> None:
    halves = torch.tensor_split(tensor, 2)
    along_trees(messages, list(zip(places(rank, size), halves, strict=True)), combine)


def places(rank: int, size: int) -> tuple[Place, Place]:
    """This rank's place in both trees.

    The second is the first one mirrored or, where n is odd and mirroring would keep the inner ranks
    where they are, moved on by one.
    """
    first = parents(size)
    if size % 2 == 0:
        renamed = [size - 1 - other for other in range(size)]
    else:
        renamed = [(other + 1) % size for other in range(size)]
    second: list[int | None] = [None] * size
    for other, parent in enumerate(first):
        second[renamed[other]] = None if parent is None else renamed[parent]
    return _place(first, rank), _place(second, rank)


def parents(size: int) -> list[int | None]:
    """Each rank's parent in a binary tree whose order from left to right is that of the ranks.

    Counting from 1, odd numbers are leaves, and a number's lowest bit is its height; a parent that
    would be beyond the last rank is replaced by the next inner one to the left.
    """
    found: list[int | None] = []
    for number in range(1, size + 1):
        lowest = number & -number
        parent = (number ^ lowest) | (lowest << 1)
        if parent > size:
            parent = number ^ lowest
        found.append(parent - 1 if parent else None)
    return found


def _place(parents: Sequence[int | None], rank: int) -> Place:
    return Place(
        parents[rank], tuple(other for other, parent in enumerate(parents) if parent == rank)
    )
