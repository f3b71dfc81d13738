"""Approximate-synchronous: only updates that matter travel (Gaia, Hsieh et al. 2017, NSDI).

A worker adds up its updates of each row. Once the sum is larger than `significance` of the row's
own size, it is pushed; until then it is held back, for ever if it stays small. As training comes
to rest updates shrink, and so may the threshold: significance / sqrt(1 + decay * clock).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkdml.errors import ParameterError
from sparkdml.server.consistency.base import Consistency


@dataclass(frozen=True)
class ASP(Consistency):
    waits = False
    significance: float = 0.01
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.significance >= 0:
            raise ParameterError("significance", self.significance, "at least 0")
        if not self.decay >= 0:
            raise ParameterError("decay", self.decay, "at least 0")

    def may_read(self, clock: int, slowest: int) -> bool:
        return True

    def may_go_on(self, stamp: int, clock: int) -> bool:
        return True

    def threshold(self, clock: int) -> float:
        return self.significance / math.sqrt(1 + self.decay * clock)
