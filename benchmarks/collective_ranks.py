"""Each rank's part of `collectives.py`: the sums of one backend and of the topologies over it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.allreduce import median_seconds
from sparkdml.comm.base import Communicator
from sparkdml.comm.topologies.opening import TOPOLOGIES, open_topology

HOROVOD, TORCH = "Horovod's own", "torch.distributed's own"
# Over the torch backend; "native" is torch's, and "auto" is one of the others.
OURS = tuple(name for name in TOPOLOGIES if name not in ("auto", "native"))

_UNTIMED = 5

SumInPlace = Callable[[Tensor], object]

_opened: dict[str, SumInPlace] = {}  # in a rank's process: once, for all of its turns


def open_sums(comm: Communicator, backend: str) -> None:
    import torch.distributed as dist

    if backend == "horovod":
        _opened[HOROVOD] = _horovods_own
        return
    _opened[TORCH] = dist.all_reduce
    for name in OURS:
        _opened[name] = open_topology(name, comm).allreduce_


def time_sums(comm: Communicator, size: int, count: int) -> dict[str, float]:
    """Contender -> the median seconds of this rank's calls, all of them with `size` floats."""
    tensor = torch.empty(size)
    measured = {}
    for name, sum_in_place in _opened.items():
        measured[name] = median_seconds(sum_in_place, tensor, count, _UNTIMED)
        if not bool((tensor == comm.size).all()):
            raise RuntimeError(f"{name}: {comm.size} ranks of ones must sum to {comm.size}")
    return measured


def _horovods_own(tensor: Tensor) -> None:
    import horovod.torch as hvd

    # Horovod tells tensors apart by name: one that stays lets it use its response cache.
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"floats-{tensor.numel()}")
