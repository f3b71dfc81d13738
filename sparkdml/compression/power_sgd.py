"""Gradients of matrices as products of two thin ones, found by one step of power iteration.

The thin ones are linear in the gradient, so allreduce adds them up. A step begins with the last
one's result, which is near: gradients change slowly. Vectors, and matrices that would not get
smaller, travel as they are. (Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator
from sparkdml.compression.base import Compression, Reducer
from sparkdml.compression.error_feedback import DebtReducer, End, copy_all_
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


class PowerReducer(DebtReducer):
    """Two allreduces a bucket: the first overlaps with backward, the second follows from it."""

    def __init__(
        self, rank: int, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]
    ) -> None:
        super().__init__(comm, params, buckets)
        self._shapes = [[thin_shape(shape, rank) for shape in b.shapes] for b in buckets]
        self._bases: list[list[Tensor]] = []  # a thin matrix for each wide one, the last result
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for bucket, shapes in zip(buckets, self._shapes, strict=True):
            self._bases.append(
                [
                    torch.randn(shape[1], min(rank, *shape), generator=generator).to(
                        bucket.tensor.device
                    )
                    for shape in shapes
                    if shape is not None
                ]
            )

    def _pieces(self, index: int, flat: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Each parameter's stretch, as a matrix where it is one, and whether it is."""
        sizes = [shape.numel() for shape in self._buckets[index].shapes]
        for piece, shape in zip(flat.split_with_sizes(sizes), self._shapes[index], strict=True):
            yield (piece, False) if shape is None else (piece.view(shape), True)

    def begin(self, index: int, wanted: Tensor, rows: float) -> End:
        bases = self._bases[index]
        pieces = list(self._pieces(index, wanted))
        matrices = [piece for piece, is_matrix in pieces if is_matrix]
        plain = [piece for piece, is_matrix in pieces if not is_matrix]
        firsts = [matrix @ base for matrix, base in zip(matrices, bases, strict=True)]
        flat = torch.cat([part.reshape(-1) for part in (*firsts, *plain)])
        work = self._comm.allreduce_async_(flat)

        def end() -> tuple[Tensor, Tensor]:
            work.wait()
            parts = flat.split_with_sizes([part.numel() for part in (*firsts, *plain)])
            left = [
                orthogonal(part.view(first.shape))
                for part, first in zip(parts, firsts, strict=False)
            ]
            own = [matrix.T @ base for matrix, base in zip(matrices, left, strict=True)]
            right = self._sum(own)
            sent, total = wanted.clone(), torch.empty_like(wanted)
            sums = iter(parts[len(firsts) :])
            sides = iter(zip(left, own, right, strict=True))
            into = zip(self._pieces(index, sent), self._pieces(index, total), strict=True)
            for (mine, is_matrix), (summed, _) in into:
                if is_matrix:
                    base, own_side, all_sides = next(sides)
                    torch.mm(base, own_side.T, out=mine)
                    torch.mm(base, all_sides.T, out=summed)
                else:
                    summed.copy_(next(sums))
            for base, result in zip(bases, right, strict=True):
                if bool(result.any()):  # a step without rows has no direction to go on from
                    base.copy_(result)
            return sent, total

        return end

    def _sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        flat = self._comm.allreduce_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def state(self) -> State:
        return {**super().state(), "bases": Entry(self._bases)}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        for bases, saved in zip(self._bases, state.get("bases", ()), strict=False):
            copy_all_(bases, saved)


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Send each matrix of the gradient as a product of two thin ones, with error feedback.

    Args:
        rank: how thin: the number of columns of both. A matrix of n by m numbers becomes
            rank * (n + m).
    """

    rank: int = 2
    any_topology: ClassVar[bool] = True
    has_debts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ParameterError("rank", self.rank, "a whole number of at least 1")

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return PowerReducer(self.rank, comm, params, buckets)
