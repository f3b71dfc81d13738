"""Stale-synchronous: nobody runs more than s clocks ahead of the slowest (Ho et al. 2013, NIPS).

A worker that has finished c clocks reads a model that has all updates of the clocks before c - s,
of every worker, and its own of all clocks (read-my-writes); it may have later ones too. So a value
that was read while the slowest had finished m clocks may be read again, without the servers, for as
long as m >= c - s. The same bound holds for workers that each update a part of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdml.errors import ParameterError
from sparkdml.server.consistency.base import Consistency


@dataclass(frozen=True)
class SSP(Consistency):
    caches = True
    staleness: int = 3

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ParameterError("staleness", self.staleness, "at least 0")

    def may_read(self, clock: int, slowest: int) -> bool:
        return slowest >= clock - self.staleness

    def may_reuse(self, stamp: int, clock: int) -> bool:
        return stamp >= clock - self.staleness
