"""W4's timing loop: one blocking allreduce after another, the median of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measurement import allreduce_metric
from benchmarks.workloads import WORKERS, Allreduce

# Horovod negotiates every name that it hasn't seen; a training loop has long seen them all.
_UNTIMED = 50


def time_allreduce(
    workload: Allreduce, sum_in_place: Callable[[Tensor], object]
) -> dict[str, float]:
    """Return this rank's median seconds for each size; the ranks stay in lockstep by themselves."""
    seconds = {}
    for size, repeats in zip(workload.sizes, workload.repeats, strict=True):
        tensor = torch.ones(size)
        sum_in_place(tensor)
        if not bool((tensor == WORKERS).all()):
            raise RuntimeError(f"{WORKERS} ranks of ones must sum to {WORKERS}, got {tensor[:4]}")
        seconds[allreduce_metric(size)] = median_seconds(sum_in_place, tensor, repeats, _UNTIMED)
    return seconds


def median_seconds(
    sum_in_place: Callable[[Tensor], object], tensor: Tensor, count: int, num_untimed: int
) -> float:
    """Time `count` sums of ones, after some that are not timed."""
    taken = []
    for _ in range(num_untimed + count):
        tensor.fill_(1.0)
        start = time.perf_counter()
        sum_in_place(tensor)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[num_untimed:])
