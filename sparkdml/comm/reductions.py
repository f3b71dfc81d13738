"""Reducing tensors that are all at hand: in rank order, so that two runs give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparkdml.comm.base import ReduceOp

# How each op takes one more tensor into a total.
IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, other: total.add_(other),
    "mean": lambda total, other: total.add_(other),
    "min": lambda total, other: torch.minimum(total, other, out=total),
    "max": lambda total, other: torch.maximum(total, other, out=total),
    "product": lambda total, other: total.mul_(other),
}


def reduce_in_rank_order(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """A new tensor; those given are not changed."""
    total = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    combine = IN_PLACE[op]
    for tensor in tensors[1:]:
        combine(total, tensor.detach())
    return total.div_(len(tensors)) if op == "mean" else total
