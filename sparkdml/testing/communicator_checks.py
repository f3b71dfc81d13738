"""The registry of checks of communicators, and their helpers.

A check is a function that runs on all ranks at the same time. Its numbers are small integers, so
sums are exact in every dtype and order, and can be compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparkdml.comm.base import Communicator, ReduceOp

Check = Callable[[Communicator], None]

# By name, in the order of definition; `check` adds to it.
CHECKS: dict[str, Check] = {}

REDUCED_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
MOVED_DTYPES = (*REDUCED_DTYPES, torch.bool, torch.complex64, torch.complex128)


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype, f"{actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert torch.equal(actual, expected), f"{actual}, not {expected}"


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of small integers that depend on the rank."""
    count = torch.arange(int(torch.tensor(shape).prod()) if shape else 1)
    return (count % 5 + rank + 1).reshape(shape).to(dtype)


def marked_tensors(rank: int) -> tuple[Tensor, Tensor]:
    """Return a lazily conjugated and a lazily negated tensor; their memory is unchanged."""
    conjugated = torch.complex(of_rank(rank, 3), of_rank(rank, 3)).conj()
    negated = torch.complex(of_rank(rank, 1), of_rank(rank, 1)).conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    assert negated.is_contiguous()
    return conjugated, negated


def reduced(size: int, op: ReduceOp, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    stacked = torch.stack([of_rank(rank, *shape) for rank in range(size)]).double()
    results: dict[str, Tensor] = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
        "product": stacked.prod(0),
    }
    return results[op].to(dtype)
