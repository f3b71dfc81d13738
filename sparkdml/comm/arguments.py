"""Checks of the arguments of collectives, the same for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from sparkdml.comm.base import ReduceOp
from sparkdml.errors import ParameterError

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


def check_reduction(tensor: Tensor, op: str) -> None:
    if op not in REDUCE_OPS:
        raise ParameterError("op", op, f"one of {', '.join(REDUCE_OPS)}")
    dtype = tensor.dtype
    if dtype.is_floating_point:
        return
    if dtype == torch.bool:
        raise ParameterError("tensor.dtype", dtype, "a numeric dtype", "Use uint8 with min or max.")
    if dtype.is_complex:
        raise ParameterError("tensor.dtype", dtype, "real", "Reduce torch.view_as_real(tensor).")
    if dtype in (torch.uint32, torch.uint64):
        raise ParameterError("tensor.dtype", dtype, "a signed or small integer dtype", "Use int64.")
    if op == "mean":
        raise ParameterError(
            "tensor.dtype", dtype, "floating point for op='mean'", "Convert it, or use op='sum'."
        )


def check_scatterable(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ParameterError(
            "tensor", "a tensor without dimensions", "a tensor with at least one dimension"
        )


def check_rank(parameter: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise ParameterError(parameter, value, f"a rank from 0 to {size - 1}")


def check_peer(parameter: str, value: int, rank: int, size: int) -> None:
    if not 0 <= value < size or value == rank:
        allowed = f"a rank from 0 to {size - 1} other than this one ({rank})"
        raise ParameterError(parameter, value, allowed)


def check_one_for_each_rank(tensors: Sequence[Tensor], size: int) -> None:
    if len(tensors) != size:
        allowed = f"one tensor for each of the {size} ranks"
        raise ParameterError("tensors", f"{len(tensors)} tensors", allowed)


def check_one_dtype(tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ParameterError("tensors", found, "of one dtype")


def check_scattered(tensors: Sequence[Tensor] | None, rank: int, size: int, root: int) -> None:
    """Check that the root passes one tensor per rank, and the other ranks None."""
    check_rank("root", root, size)
    if rank != root:
        if tensors is not None:
            raise ParameterError("tensors", tensors, f"None on every rank but the root ({root})")
        return
    if tensors is None:
        raise ParameterError("tensors", None, f"one tensor for each rank on the root ({root})")
    check_one_for_each_rank(tensors, size)
    check_one_dtype(tensors)
