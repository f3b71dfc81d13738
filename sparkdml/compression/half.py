"""Gradients in sixteen bits: half the bytes, and a rounding error too small for error feedback.

FP16 has eleven bits of precision and a small range. So each bucket has a scale, a power of two that
follows the last averaged gradient and is therefore the same on every rank without communication. If
a sum overflows nevertheless, every rank sees it, and the bucket is sent again in full precision.
(Scaling as in Micikevicius et al. 2018, arXiv 1710.03740.) BF16 has float32's range and eight bits
of precision.
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

TARGET = 10  # scales the last sum's largest number to 2**TARGET; 2**16 would overflow


def next_scale(largest: float, scale: float) -> float:
    """Return the power of two that scales `largest` to about 2**TARGET, or else the old scale."""
    if not largest or not math.isfinite(largest):
        return scale
    exponent = TARGET - math.frexp(largest)[1]
    return 2.0 ** max(-60, min(60, exponent))


class HalfReducer(Reducer):
    """Rounds each bucket to a half-precision dtype, in memory that is reused in every step."""

    def __init__(self, dtype: torch.dtype, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._comm, self._buckets = comm, buckets
        self._grads = [bucket.grads for bucket in buckets]
        self._small = [torch.empty_like(grads, dtype=dtype) for grads in self._grads]
        self._begin = [comm.repeated(small) for small in self._small]

    def reduce_async_(self, index: int) -> Work:
        begun, small = begin_stats(self._comm, self._buckets[index]), self._small[index]
        if not small.numel():
            return Unfinished(begun, lambda: None)
        self._round(index)
        is_carried = self._comm.carries(small)
        if is_carried:
            begun.append(self._begin[index]())

        def finish() -> None:
            if not is_carried:
                sum_exchanged_(self._comm, small)
            self._take_sum(index)

        return Unfinished(begun, finish)

    def _round(self, index: int) -> None:
        """Round the gradients into the buffer; they stay unchanged until the sum has arrived."""
        self._small[index].copy_(self._grads[index])

    def _take_sum(self, index: int) -> None:
        self._grads[index].copy_(self._small[index])


class ScaledReducer(HalfReducer):
    """Rounds to float16, with one scale per bucket."""

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        super().__init__(torch.float16, comm, buckets)
        self._lengths = [len(grads) for grads in self._grads]
        self._scales = [1.0] * len(buckets)
        # Shared by all buckets, as each needs it only within one call.
        self._scratch = self._grads[0].new_empty(max(self._lengths), dtype=torch.float32)

    def _round(self, index: int) -> None:
        scaled = self._scratch[: self._lengths[index]]
        torch.mul(self._grads[index], self._scales[index], out=scaled)
        self._small[index].copy_(scaled)

    def _take_sum(self, index: int) -> None:
        grads, scale = self._grads[index], self._scales[index]
        total = self._scratch[: len(grads)].copy_(self._small[index])
        largest = largest_of(total) / scale
        if math.isfinite(largest):
            torch.mul(total, 1 / scale, out=grads)  # exact: the scale is a power of two
        else:
            largest = largest_of(self._comm.allreduce_(grads))
        self._scales[index] = next_scale(largest, scale)

    def state(self) -> State:
        return {"scales": Entry(self._scales), "lengths": Entry(self._lengths)}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        scales = state.get("scales", self._scales)
        lengths = state.get("lengths", self._lengths)  # earlier checkpoints have none
        if lengths != self._lengths or len(scales) != len(self._scales):
            return ["scales"]
        self._scales = list(scales)
        return []


def largest_of(numbers: Tensor) -> float:
    """Return the largest absolute value; infinite or NaN if any number is."""
    low, high = torch.stack(torch.aminmax(numbers)).tolist()
    return float(max(-low, high))


def sum_exchanged_(comm: Communicator, small: Tensor) -> None:
    """Sum over ranks with a backend that can't reduce this dtype: each adds a part in float32."""
    parts = torch.tensor_split(small, comm.size)
    lengths = [len(part) for part in parts]
    received = comm.alltoall(parts, [lengths[comm.rank]] * comm.size)
    own = torch.stack([part.float() for part in received]).sum(0)
    torch.cat(comm.allgather(own.to(small.dtype), lengths), out=small)


@dataclass(frozen=True)
class FP16(Compression):
    """Send gradients as float16, scaled so that neither large nor small ones are lost."""

    any_topology: ClassVar[bool] = True
    has_residuals: ClassVar[bool] = False

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return ScaledReducer(comm, buckets)


@dataclass(frozen=True)
class BF16(Compression):
    """Send gradients as bfloat16: float32's range, with two to three significant digits."""

    any_topology: ClassVar[bool] = True
    has_residuals: ClassVar[bool] = False

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return HalfReducer(torch.bfloat16, comm, buckets)
