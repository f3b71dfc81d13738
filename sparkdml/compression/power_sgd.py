"""Gradients of matrices as products of two thin ones, found by one step of power iteration.

The thin ones are linear in the gradient, so allreduce adds them up. A step begins with the last
one's result, which is near: gradients change slowly. Vectors, and matrices that would not get
smaller, travel as they are. (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727.)

Each rank works out the base and the products by itself, so that the sums are the same on every rank
only where the ranks' processors (and their linear algebra) round alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator
from sparkdml.compression.base import Compression, Reducer
from sparkdml.compression.error_feedback import End, ResidualReducer, copy_all_, load_all_
from sparkdml.errors import ParameterError
from sparkdml.training.flat import Bucket, FlatParams


def thin_shape(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """The matrix that a parameter is taken for, if it is worth it: a row for each output."""
    if len(shape) < 2 or 0 in shape:
        return None
    height, width = shape[0], torch.Size(shape).numel() // shape[0]
    return (height, width) if min(rank, height, width) * (height + width) < height * width else None


def orthogonal(columns: Tensor) -> Tensor:
    """An orthonormal base of what the columns span; columns of zeros get any direction."""
    base: Tensor = torch.linalg.qr(columns).Q
    return base


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A copy of all in one flat tensor, and views of it in their shapes."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
    views = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return flat, [view.view(tensor.shape) for view, tensor in zip(views, tensors, strict=True)]


def multiply_(into: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Each product of two thin matrices, where it belongs."""
    for target, one, other in zip(into, left, right, strict=True):
        torch.mm(one, other.T, out=target)


class PowerReducer(ResidualReducer):
    """Two allreduces a bucket: the first overlaps with backward, the second follows from it."""

    def __init__(
        self, rank: int, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]
    ) -> None:
        super().__init__(comm, params, buckets)
        self._shapes = [[thin_shape(shape, rank) for shape in b.shapes] for b in buckets]
        self._bases: list[list[Tensor]] = []  # a thin matrix for each wide one, the last result
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for shapes in self._shapes:
            thin = [(shape[1], min(rank, *shape)) for shape in shapes if shape is not None]
            bases = [torch.randn(shape, generator=generator) for shape in thin]
            self._bases.append([base.to(params.values.device) for base in bases])

    def _parted(self, index: int, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of a bucket's parameters: those that are taken for matrices, and the others."""
        sizes = [shape.numel() for shape in self.buckets[index].shapes]
        pairs = list(zip(flat.split_with_sizes(sizes), self._shapes[index], strict=True))
        matrices = [piece.view(shape) for piece, shape in pairs if shape is not None]
        return matrices, [piece for piece, shape in pairs if shape is None]

    def begin(self, index: int, wanted: Tensor, rows: float) -> End:
        bases = self._bases[index]
        matrices, others = self._parted(index, wanted)
        lefts = [matrix @ base for matrix, base in zip(matrices, bases, strict=True)]
        flat, parts = packed([*lefts, *others])
        work = self.comm.allreduce_async_(flat)

        def end() -> tuple[Tensor, Tensor]:
            work.wait()
            left = [orthogonal(part) for part in parts[: len(lefts)]]
            own = [matrix.T @ side for matrix, side in zip(matrices, left, strict=True)]
            flat, right = packed(own)
            if own:
                self.comm.allreduce_(flat)
            sent, total = wanted.clone(), torch.empty_like(wanted)
            multiply_(self._parted(index, sent)[0], left, own)
            into, others_into = self._parted(index, total)
            multiply_(into, left, right)
            copy_all_(others_into, parts[len(lefts) :])
            for base, result in zip(bases, right, strict=True):
                if bool(result.any()):  # a step without rows has no direction to go on from
                    base.copy_(result)
            return sent, total

        return end

    def state(self) -> State:
        return {**super().state(), "bases": Entry(self._bases)}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        lost = super().load(state)
        if "bases" in state:
            # They belong to parameters, whatever buckets those are in.
            own, saved = list(chain(*self._bases)), list(chain(*state["bases"]))
            lost += load_all_("bases", own, saved)
        return lost


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Send each matrix of the gradient as a product of two thin ones, with error feedback.

    Args:
        rank: how thin: the number of columns of both. A matrix of n by m numbers becomes
            rank * (n + m).
    """

    rank: int = 2
    any_topology: ClassVar[bool] = True
    has_residuals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ParameterError("rank", self.rank, "a whole number of at least 1")

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return PowerReducer(self.rank, comm, params, buckets)
