"""The measurements of one call of a contender. All are in seconds, so all ratios have one rule."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

WHOLE_CALL = "whole call"  # from the call to its return, process starts and reading included
FIRST_STEP = "first step"  # from the call to the end of the slowest rank's first step
LOAD = "load"  # reading Parquet into memory, where the contender does that before its loop
FIRST_EPOCH = "first epoch"
LATER_EPOCHS = "later epochs"  # the median of the second epoch and later
# The same if the ranks waited for each other after every step: the cost of free synchronization.
IN_STEP = "later epochs, in step"
EPOCH_METRICS = (FIRST_EPOCH, LATER_EPOCHS)


def allreduce_metric(size: int) -> str:
    return f"{size:,} floats"


@dataclass(frozen=True)
class Measurement:
    """`rows` and `loss` are the evidence that the contender did the same work as the others."""

    seconds: dict[str, float]
    rows: int = 0  # trained on in one epoch, over all ranks
    loss: float | None = None  # mean over the rows of the last epoch
    load_average: float = field(default=0.0)  # the machine's, just before the call

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
