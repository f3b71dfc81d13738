"""What of a parameter server's arguments goes together with which consistency model."""

from __future__ import annotations

from sparkdml.errors import ParameterError
from sparkdml.server.consistency import Consistency
from sparkdml.server.consistency.expulsion import Expulsion


def may_overlap(consistency: Consistency) -> bool:
    """Whether a worker may ever compute on a model that lacks some clock's updates."""
    return not consistency.aggregates


def check_overlap(consistency: Consistency, overlap: bool | None) -> None:
    if overlap and not may_overlap(consistency):
        raise ParameterError(
            "overlap",
            overlap,
            f"None or False with {consistency!r}: each gradient is computed on the latest model",
            "Use consistency=SSP(), ASP() or TAP().",
        )


def check_expulsion(consistency: Consistency, expulsion: Expulsion | None) -> None:
    """A worker can be excused only from what it is waited for in."""
    if expulsion is not None and not isinstance(expulsion, Expulsion):
        raise ParameterError("expulsion", expulsion, "Expulsion(…) or None")
    if expulsion is not None and not consistency.waits:
        raise ParameterError(
            "expulsion",
            expulsion,
            f"None with {consistency!r}, under which nobody waits for a slow worker",
            "Leave it out, or use consistency=BSP() or SSP().",
        )
    if expulsion is None and consistency.stands_in:
        raise ParameterError(
            "consistency",
            consistency,
            "one without stand_in where no worker is ever excused",
            "Give expulsion=Expulsion(), which says when one is.",
        )
