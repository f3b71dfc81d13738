"""The root of synchronous SGD with backup workers: the first n gradients of a step are its sum.

It knows nothing of wires: gradients arrive by a call, and answers leave by one. Every rank gets
every step's sum, in order, so that all models stay alike, those of late ranks too: they find
several sums waiting, and go on from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sparkdml.comm.reductions import reduce_in_rank_order
from sparkdml.training.totals import ROWS, VOTES

Gradient = list[Tensor]  # buckets; the last one ends with the stats
Reply = Callable[[int, Sequence[Gradient]], None]


@dataclass
class Root:
    """`reply(rank, sums)` is called once for each gradient that arrived, from any thread.

    Args:
        size: of all ranks.
        num_needed: how many gradients make a step.
        num_stats: how many numbers at the end of the last bucket are the stats.
        max_lag: how many steps the slowest rank may be behind. At that, it is waited for.
    """

    size: int
    num_needed: int
    num_stats: int
    max_lag: int
    reply: Reply
    step: int = 0  # the one that gradients are collected for
    num_dropped: int = 0  # gradients
    _arrived: dict[int, Gradient] = field(default_factory=dict)
    _sums: dict[int, Gradient] = field(default_factory=dict)  # of steps that somebody still needs
    _at: dict[int, int] = field(default_factory=dict)  # the step that each rank is computing
    _late: set[int] = field(default_factory=set)  # ranks whose last gradient in a race was dropped
    _late_votes: Tensor | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._at = dict.fromkeys(range(self.size), 0)

    def arrive(self, rank: int, step: int, gradient: Gradient) -> None:
        """A rank's gradient of a step; kept, so it must not be changed any more."""
        with self._lock:
            assert step == self._at[rank] <= self.step, "ranks send what they were told to compute"
            if step < self.step:
                self._late.add(rank)
                self._drop(gradient)
                self._answer(rank)
            else:
                self._arrived[rank] = gradient
            while self._is_enough() and self._nobody_is_lost():
                self._finish_step()

    def _is_enough(self) -> bool:
        """Whether the step can do without the rest.

        A rank without rows answers at once, and must not take the place of one that has some and
        keeps up. Those that are behind, or were in the last race, are not waited for.
        """
        if len(self._arrived) < self.num_needed:
            return False
        missing = self._at.keys() - self._arrived.keys()
        return self._num_with_rows() >= self.num_needed or all(
            rank in self._late or self._at[rank] < self.step for rank in missing
        )

    def _num_with_rows(self) -> int:
        return sum(bool(self._stats(one)[ROWS]) for one in self._arrived.values())

    def _nobody_is_lost(self) -> bool:
        missing = [at for rank, at in self._at.items() if rank not in self._arrived]
        return not missing or self.step - min(missing) < self.max_lag

    def _drop(self, gradient: Gradient) -> None:
        """Its rows are skipped. A wish for a checkpoint or for the end is heard all the same."""
        self.num_dropped += 1
        votes = self._stats(gradient)[VOTES]
        self._late_votes = votes.clone() if self._late_votes is None else self._late_votes + votes

    def _finish_step(self) -> None:
        if self._num_with_rows() >= self.num_needed:  # else they had nobody to be quicker than
            self._late.difference_update(self._arrived)
        ranks = sorted(self._arrived)  # added in rank order: the same bits for the same arrivals
        parts = zip(*(self._arrived[rank] for rank in ranks), strict=True)
        total = [reduce_in_rank_order(list(buckets), "sum") for buckets in parts]
        if self._late_votes is not None:
            self._stats(total)[VOTES] += self._late_votes
            self._late_votes = None
        self._sums[self.step] = total
        self._arrived = {}
        self.step += 1
        for rank in ranks:
            self._answer(rank)

    def _answer(self, rank: int) -> None:
        sums = [self._sums[step] for step in range(self._at[rank], self.step)]
        self._at[rank] = self.step
        self.reply(rank, sums)
        for step in [one for one in self._sums if one < min(self._at.values())]:
            del self._sums[step]

    def _stats(self, gradient: Gradient) -> Tensor:
        return gradient[-1][-self.num_stats :]
