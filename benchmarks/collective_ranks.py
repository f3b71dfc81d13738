"""What each rank does in `collectives.py`: every way to sum, taking turns in the same processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.measurement import allreduce_metric
from sparkdml.comm.backends import horovod_available, open_communicator
from sparkdml.comm.base import World
from sparkdml.comm.topologies.opening import TOPOLOGIES, open_topology

HOROVOD, TORCH = "Horovod's own", "torch.distributed's own"
# Over the torch backend; "native" is torch's, and "auto" is one of the others.
OURS = tuple(name for name in TOPOLOGIES if name not in ("auto", "native"))

_UNTIMED = 5

SumInPlace = Callable[[Tensor], object]


def time_in_turns(
    world: World, sizes: Sequence[int], repeats: Sequence[int], rounds: int
) -> list[dict[str, dict[str, float]]]:
    """For each round: contender -> metric -> the median seconds of this rank's calls."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        contenders = _open(world, stack)
        return [_one_round(contenders, world.size, sizes, repeats) for _ in range(rounds)]


def _open(world: World, stack: ExitStack) -> dict[str, SumInPlace]:
    import torch.distributed as dist

    contenders: dict[str, SumInPlace] = {}
    if horovod_available():
        stack.enter_context(open_communicator("horovod", world))
        contenders[HOROVOD] = _horovods_own
    comm = stack.enter_context(open_communicator("torch", world))
    contenders[TORCH] = dist.all_reduce
    for name in OURS:
        contenders[name] = stack.enter_context(open_topology(name, comm)).allreduce_
    return contenders


def _horovods_own(tensor: Tensor) -> None:
    import horovod.torch as hvd

    # Horovod tells tensors apart by name: one that stays lets it use its response cache.
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"floats-{tensor.numel()}")


def _one_round(
    contenders: dict[str, SumInPlace], ranks: int, sizes: Sequence[int], repeats: Sequence[int]
) -> dict[str, dict[str, float]]:
    measured: dict[str, dict[str, float]] = {name: {} for name in contenders}
    for size, count in zip(sizes, repeats, strict=True):
        tensor = torch.empty(size)
        for name, sum_in_place in contenders.items():
            taken = []
            for _ in range(_UNTIMED + count):
                tensor.fill_(1.0)
                start = time.perf_counter()
                sum_in_place(tensor)
                taken.append(time.perf_counter() - start)
            if not bool((tensor == ranks).all()):
                raise RuntimeError(f"{name}: {ranks} ranks of ones must sum to {ranks}")
            measured[name][allreduce_metric(size)] = statistics.median(taken[_UNTIMED:])
    return measured
