"""Bulk-synchronous: everyone waits for everyone (Valiant 1990).

The pushes of a clock are added up with their weights, in the order of the workers, and applied as
one: the result equals synchronous SGD on the combined batch, and two runs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdml.server.consistency.base import Consistency


@dataclass(frozen=True)
class BSP(Consistency):
    """Read the model after all pushes of all workers' last clock, and none of the next.

    Args:
        stand_in: the last gradient of a worker that was excused (see `Expulsion`) stands in for
            the one that is missing. What it sends itself, it sends too late for its own clock: it
            joins the next step, in place of the stand-in.
    """

    aggregates = True
    stand_in: bool = False

    @property
    def stands_in(self) -> bool:  # type: ignore[override]
        return self.stand_in

    def may_read(self, clock: int, slowest: int) -> bool:
        return slowest >= clock
