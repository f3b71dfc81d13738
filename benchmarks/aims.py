"""What the project promises about its speed, as checks on the measured ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measurement import FIRST_EPOCH, FIRST_STEP, LATER_EPOCHS, WHOLE_CALL
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast

_PACKAGED = ("torch-distributor", "torch-distributor-dataframe")


@dataclass(frozen=True)
class FastEnough:
    """`contender` must be at least `at_least` times as fast as the best of `others`."""

    workload: str
    metric: str
    contender: str
    others: tuple[str, ...]
    at_least: float
    what: str

    @property
    def wanted(self) -> str:
        return f"at least {self.at_least:g} times as fast"

    def measured(self, rounds: Sequence[Round]) -> Spread | None:
        return times_as_fast(rounds, self.contender, self.others, self.metric)

    def reached(self, spread: Spread) -> bool:
        return spread.median >= self.at_least


@dataclass(frozen=True)
class SoonEnough:
    """`contender` must take at most `at_most` seconds."""

    workload: str
    metric: str
    contender: str
    at_most: float
    what: str

    @property
    def wanted(self) -> str:
        return f"at most {self.at_most:g} s"

    def measured(self, rounds: Sequence[Round]) -> Spread | None:
        return Spread.of(seconds_of(rounds, self.contender, self.metric))

    def reached(self, spread: Spread) -> bool:
        return spread.median <= self.at_most


Aim = FastEnough | SoonEnough


def _for_both(
    workload: str, metric: str, others: tuple[str, ...], at_least: float, what: str
) -> list[Aim]:
    return [
        FastEnough(workload, metric, f"sparkdml-{backend}", others, at_least, f"{what}, {backend}")
        for backend in ("horovod", "torch")
    ]


AIMS: list[Aim] = [
    *(
        SoonEnough("W3", FIRST_STEP, f"sparkdml-{backend}", 0.5, f"warm first step, {backend}")
        for backend in ("horovod", "torch")
    ),
    *_for_both("W1", WHOLE_CALL, _PACKAGED, 3.0, "whole call against the best packaged peer"),
    *(
        FastEnough(workload, metric, ours, (bare,), 0.95, f"{metric} against bare {bare}")
        for workload, metric in (("W1", FIRST_EPOCH), ("W1-steady", LATER_EPOCHS))
        for ours, bare in (("sparkdml-horovod", "horovodrun"), ("sparkdml-torch", "torchrun"))
    ),
    *_for_both("W1-steady", LATER_EPOCHS, ("feed-limit",), 0.9, "later epochs against the limit"),
    *_for_both("W2-steady", LATER_EPOCHS, ("torchrun",), 1.0, "later epochs against bare DDP"),
]


def judge(rounds: Mapping[str, Sequence[Round]]) -> list[tuple[Aim, Spread]]:
    """Return the aims for which this run has measurements, each with its measurement."""
    judged = []
    for aim in AIMS:
        spread = aim.measured(rounds.get(aim.workload, ()))
        if spread is not None:
            judged.append((aim, spread))
    return judged
