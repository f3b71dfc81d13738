"""Sixteen bits on the wire: half the bytes, and a rounding error that isn't worth a debt.

FP16 has eleven bits of precision and a small range. So each bucket has a scale, a power of two that
follows the last agreed gradient, the same on every rank without a word. Should a sum overflow all
the same, every rank sees it, and the bucket is sent once more, in full. (Scaling as in Micikevicius
et al. 2018, arXiv 1710.03740.) BF16 has float32's range and eight bits of precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparkdml.checkpoint.state import Entry, State
from sparkdml.comm.base import Communicator, Work
from sparkdml.compression.base import Compression, Reducer, Unfinished, begin_stats
from sparkdml.training.flat import Bucket, FlatParams

TARGET = 10  # the largest number of the last sum would have become 2**TARGET; 2**16 is too large


def next_scale(largest: float, scale: float) -> float:
    """The power of two that brings `largest` near 2**TARGET; the old one if it is no use."""
    if not largest or not math.isfinite(largest):
        return scale
    exponent = TARGET - math.frexp(largest)[1]
    return 2.0 ** max(-60, min(60, exponent))


class HalfReducer(Reducer):
    """Rounds each bucket to a half-precision type."""

    def __init__(self, dtype: torch.dtype, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._dtype, self._comm, self._buckets = dtype, comm, buckets
        self._scales = [1.0] * len(buckets)

    def reduce_async_(self, index: int) -> Work:
        bucket = self._buckets[index]
        begun = begin_stats(self._comm, bucket)
        if not bucket.num_parameters:
            return Unfinished(begun, lambda: None)
        small = (bucket.grads * self._scales[index]).to(self._dtype)
        is_carried = self._comm.carries(small)
        if is_carried:
            begun.append(self._comm.allreduce_async_(small))

        def finish() -> None:
            total = small.float() if is_carried else sum_exchanged(self._comm, small)
            total.div_(self._scales[index])
            if self._dtype is torch.float16:
                if not bool(torch.isfinite(total).all()):
                    total = self._comm.allreduce_(bucket.grads)
                largest = float(total.abs().max())
                self._scales[index] = next_scale(largest, self._scales[index])
            bucket.grads.copy_(total)

        return Unfinished(begun, finish)

    def state(self) -> State:
        return {"scales": Entry(self._scales)} if self._dtype is torch.float16 else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self._scales = list(state.get("scales", self._scales))


def sum_exchanged(comm: Communicator, small: Tensor) -> Tensor:
    """The sum where the backend would reduce wider numbers: a part each, added up in float32."""
    parts = comm.alltoall(torch.tensor_split(small, comm.size))
    own = torch.stack([part.float() for part in parts]).sum(0)
    return torch.cat(comm.allgather(own.to(small.dtype))).float()


@dataclass(frozen=True)
class FP16(Compression):
    """Gradients travel as float16, scaled so that neither large nor small ones are lost."""

    any_topology: ClassVar[bool] = True
    has_debts: ClassVar[bool] = False

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return HalfReducer(torch.float16, comm, buckets)


@dataclass(frozen=True)
class BF16(Compression):
    """Gradients travel as bfloat16: any size of number, with two to three digits of it."""

    any_topology: ClassVar[bool] = True
    has_debts: ClassVar[bool] = False

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return HalfReducer(torch.bfloat16, comm, buckets)
