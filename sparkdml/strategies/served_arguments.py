"""What of a parameter server's arguments goes together with which consistency model."""

from __future__ import annotations

from sparkdml.errors import ParameterError
from sparkdml.server.consistency import Consistency
from sparkdml.server.consistency.expulsion import Expulsion
from sparkdml.server.optimizers import SGD, Updater


def may_overlap(consistency: Consistency, updater: Updater) -> bool:
    """Whether a worker may compute on a model that lacks others' last updates, but not its own.

    A momentum, and what Adagrad and Adam remember, is of all workers' gradients, on the servers.
    """
    is_plain = isinstance(updater, SGD) and not updater.momentum
    return is_plain and not consistency.aggregates


def check_overlap(overlap: bool | None, consistency: Consistency) -> None:
    if overlap and consistency.aggregates:
        raise ParameterError(
            "overlap",
            overlap,
            f"None or False with {consistency!r}: each gradient is computed on the latest model",
            "Use consistency=SSP(), ASP() or TAP().",
        )


def check_overlap_with(overlap: bool | None, updater: Updater) -> None:
    if overlap and (not isinstance(updater, SGD) or updater.momentum):
        raise ParameterError(
            "overlap",
            overlap,
            f"None or False with {updater!r}: a worker can't make such a step by itself",
            "Use SGD without momentum.",
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
