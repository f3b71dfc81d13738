"""Bulk-synchronous: everyone waits for everyone (Valiant 1990).

The pushes of a clock are added up with their weights, in the order of the workers, and applied as
one: the result equals synchronous SGD on the combined batch, and two runs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdml.server.consistency.base import Consistency


@dataclass(frozen=True)
class BSP(Consistency):
    """Read the model after all pushes of all workers' last clock, and none of the next."""

    aggregates = True

    def may_read(self, clock: int, slowest: int) -> bool:
        return slowest >= clock
