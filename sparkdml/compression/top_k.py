"""Sends only the largest entries of the gradient, as indices and values; the rest is a residual.

(Aji and Heafield 2017, arXiv 1704.05021; Lin et al. 2018, "Deep Gradient Compression", arXiv
1712.01887, without its momentum correction: the optimizer is the user's own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator
from sparkdml.compression.base import Compression, Reducer
from sparkdml.compression.error_feedback import End, ResidualReducer
from sparkdml.errors import ParameterError
from sparkdml.training.flat import Bucket, FlatParams


def largest(flat: Tensor, count: int) -> Tensor:
    """Return the `count` largest entries as pairs of an index and a float's bits, by index."""
    indices = flat.abs().topk(count, sorted=False).indices.sort().values
    return torch.stack([indices.to(torch.int32), flat[indices].view(torch.int32)], dim=1)


def spread(pairs: Tensor, into: Tensor) -> Tensor:
    """Add the pairs' values at their indices."""
    values = pairs[:, 1].contiguous().view(torch.float32)
    return into.index_add_(0, pairs[:, 0].long(), values)


class TopKReducer(ResidualReducer):
    """Sends each rank's pairs to all others, which add them up in rank order."""

    def __init__(
        self,
        fraction: float,
        comm: Communicator,
        params: FlatParams,
        buckets: Sequence[Bucket],
    ) -> None:
        super().__init__(comm, params, buckets)
        self._counts = [max(1, round(fraction * bucket.grads.numel())) for bucket in buckets]

    def begin(self, index: int, wanted: Tensor, rows: float) -> End:
        pairs = largest(wanted, self._counts[index])
        if not rows:
            pairs = pairs[:0]  # all zeros

        def end() -> tuple[Tensor, Tensor]:
            total = torch.zeros_like(wanted)
            for one in self.comm.allgather(pairs):
                spread(one, total)
            return spread(pairs, torch.zeros_like(wanted)), total

        return end


@dataclass(frozen=True)
class TopK(Compression):
    """Send the largest entries of each bucket, with error feedback.

    It sends fewer bytes than allreduce if `fraction` times the number of workers is below 1.

    Args:
        fraction: the fraction of each bucket's numbers to send, above 0 and at most 1.
    """

    fraction: float = 0.01
    any_topology: ClassVar[bool] = False
    has_residuals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ParameterError("fraction", self.fraction, "above 0 and at most 1")

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return TopKReducer(self.fraction, comm, params, buckets)
