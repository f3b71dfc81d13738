"""Low-rank gradients: each matrix as the product of two thin ones, by one power iteration step.

The thin matrices are linear in the gradient, so allreduce can sum them. A step starts from the last
result, which is close, as gradients change slowly. Vectors, and matrices that would not get
smaller, are sent uncompressed. (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727.)

Each rank computes the basis and the products by itself, so the sums are the same on every rank only
if the ranks' processors (and their linear algebra) round identically.
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
    """Return the shape of a parameter as a matrix with a row per output, or None if too small."""
    if len(shape) < 2 or 0 in shape:
        return None
    height, width = shape[0], torch.Size(shape).numel() // shape[0]
    return (height, width) if min(rank, height, width) * (height + width) < height * width else None


def orthogonal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' span; columns of zeros get any direction."""
    base: Tensor = torch.linalg.qr(columns).Q
    return base


def packed(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Copy all tensors into one flat tensor, and return it with views in their shapes."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
    views = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return flat, [view.view(tensor.shape) for view, tensor in zip(views, tensors, strict=True)]


def multiply_(into: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Write each product of two thin matrices to its target."""
    for target, one, other in zip(into, left, right, strict=True):
        torch.mm(one, other.T, out=target)


class PowerReducer(ResidualReducer):
    """Two allreduces per bucket: the first overlaps with backward, the second needs its result."""

    def __init__(
        self, rank: int, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]
    ) -> None:
        super().__init__(comm, params, buckets)
        self._shapes = [[thin_shape(shape, rank) for shape in b.shapes] for b in buckets]
        self._bases: list[list[Tensor]] = []  # the last result: a thin matrix for each wide one
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for shapes in self._shapes:
            thin = [(shape[1], min(rank, *shape)) for shape in shapes if shape is not None]
            bases = [torch.randn(shape, generator=generator) for shape in thin]
            self._bases.append([base.to(params.values.device) for base in bases])

    def _parted(self, index: int, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of a bucket's parameters: those compressed as matrices, and the others."""
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
                if bool(result.any()):  # a step without rows has no direction to start from
                    base.copy_(result)
            return sent, total

        return end

    def state(self) -> State:
        return {**super().state(), "bases": Entry(self._bases)}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        lost = super().load(state)
        if "bases" in state:
            # They belong to parameters, independent of the buckets.
            own, saved = list(chain(*self._bases)), list(chain(*state["bases"]))
            lost += load_all_("bases", own, saved)
        return lost


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Send each matrix of the gradient as a product of two thin ones, with error feedback.

    Args:
        rank: the number of columns of the thin matrices. A matrix of n by m numbers is sent as
            rank * (n + m) numbers.
    """

    rank: int = 2
    any_topology: ClassVar[bool] = True
    has_residuals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ParameterError("rank", self.rank, "a whole number of at least 1")

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return PowerReducer(self.rank, comm, params, buckets)
