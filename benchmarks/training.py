"""The training loop of every peer, as its users would write it by hand.

Peers differ in how batches come and how gradients are averaged, both of which are given from
outside; what is timed, and where, is the same for all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch
from torch import Tensor, nn

from benchmarks.measurement import FIRST_EPOCH, FIRST_STEP, LATER_EPOCHS, LOAD, Measurement
from benchmarks.workloads import SEED

Batches = Callable[[int], Iterable[tuple[Tensor, Tensor]]]  # epoch -> its batches


@dataclass(frozen=True)
class RankResult:
    """One rank's loop. `first_step_at` is on the monotonic clock, which all processes share."""

    load_seconds: float
    first_step_at: float
    epoch_seconds: list[float]
    rows: int
    loss_sum: float
    step_seconds: list[list[float]] = field(default_factory=list)  # of each epoch's steps


def shuffled_batches(features: Tensor, labels: Tensor, batch_size: int, rank: int) -> Batches:
    """Batches of tensors in memory, in a new random order every epoch."""

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(SEED + 1000 * epoch + rank)
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(labels), batch_size):
            chosen = order[start : start + batch_size]
            yield features[chosen], labels[chosen]

    return batches


def run_epochs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    epochs: int,
    load_seconds: float,
) -> RankResult:
    criterion = nn.CrossEntropyLoss()
    first_step_at = 0.0
    epoch_seconds, step_seconds = [], []
    rows, loss_sum = 0, torch.zeros(())
    for epoch in range(epochs):
        rows, loss_sum = 0, torch.zeros(())
        start = time.monotonic()
        ends = [start]
        for features, labels in batches(epoch):
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            first_step_at = first_step_at or time.monotonic()
            rows += len(labels)
            loss_sum += loss.detach() * len(labels)
            ends.append(time.monotonic())
        epoch_seconds.append(time.monotonic() - start)
        step_seconds.append([end - begin for begin, end in pairwise(ends)])
    loss_total = float(loss_sum)
    return RankResult(load_seconds, first_step_at, epoch_seconds, rows, loss_total, step_seconds)


def in_step(ranks: Sequence[RankResult]) -> list[float]:
    """How long each epoch would have taken if no rank had begun a step before all had ended one.

    A machine's pauses hit different ranks at different times. Ranks that synchronize every step pay
    all of them, even if the agreement itself cost nothing.
    """
    by_epoch = zip(*(rank.step_seconds for rank in ranks), strict=True)
    return [sum(map(max, zip_longest(*steps, fillvalue=0.0))) for steps in by_epoch]


def combine(
    result: RankResult,
    maximum: Callable[[Tensor], Tensor],
    total: Callable[[Tensor], Tensor],
) -> RankResult:
    """All ranks' results as one: the slowest rank's times, the sum of rows and losses."""
    times = [result.load_seconds, result.first_step_at, *result.epoch_seconds]
    load, first_step, *epochs = maximum(torch.tensor(times, dtype=torch.float64)).tolist()
    sums = total(torch.tensor([result.rows, result.loss_sum], dtype=torch.float64)).tolist()
    return RankResult(load, first_step, epochs, int(sums[0]), sums[1])


def merge(ranks: Sequence[RankResult]) -> RankResult:
    """Like `combine`, for results that are all in one place."""
    return RankResult(
        max(rank.load_seconds for rank in ranks),
        max(rank.first_step_at for rank in ranks),
        [max(epoch) for epoch in zip(*(rank.epoch_seconds for rank in ranks), strict=True)],
        sum(rank.rows for rank in ranks),
        sum(rank.loss_sum for rank in ranks),
    )


def as_seconds(result: RankResult, called_at: float) -> Measurement:
    """Return the measurement of a call that began at `called_at` (monotonic)."""
    seconds = {
        FIRST_STEP: result.first_step_at - called_at,
        FIRST_EPOCH: result.epoch_seconds[0],
    }
    if result.load_seconds:
        seconds[LOAD] = result.load_seconds
    if len(result.epoch_seconds) > 1:
        seconds[LATER_EPOCHS] = statistics.median(result.epoch_seconds[1:])
    return Measurement(seconds, result.rows, result.loss_sum / result.rows)
