"""When a checkpoint is due: every n steps, seconds or epochs, or at an interval that pays off.

A worker's training thread asks and tells the schedule; the writer's thread reports costs to it.
The driver only parses `every=` and `failure_seconds=`. No clock, no network: callers say `now`.

`"auto"` weighs what a checkpoint costs against the work that a failure would throw away:

- J. W. Young, "A first order approximation to the optimum checkpoint interval",
  Communications of the ACM 17(9), 1974: the interval is sqrt(2 * cost * time between failures).
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
  Future Generation Computer Systems 22(3), 2006: the same with two more terms, which still holds
  when failures come nearly as often as checkpoints.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, SupportsIndex

from sparkdml.errors import ParameterError

Unit = Literal["steps", "seconds", "epochs", "auto"]

# The largest share of the training time. A run that has no reason to expect failures should not
# notice its checkpoints. A run that does fail gains from more of them, since each saves more than
# it costs; but the costs and the failure rate are estimates, so that share is bounded as well.
OVERHEAD_WITHOUT_FAILURES = 0.03
OVERHEAD_WITH_FAILURES = 0.10

# With shorter intervals, unmeasured work (agreeing on a checkpoint, listing, pruning) dominates.
SHORTEST_SECONDS = 1.0
# Users interrupt runs too, which no failure rate predicts, and should not lose more than this.
LONGEST_SECONDS = 3600.0
# Used until the first cost is known; usually the root checkpoint is measured before that.
FIRST_SECONDS = 10.0

# The prior: one failure a day, and its weight against what is observed.
PRIOR_FAILURES = 0.1
PRIOR_SECONDS = PRIOR_FAILURES * 24 * 3600

# The newest cost counts half: the cost at step 0 is too low for optimizers that create their state
# in the first step, and a store's speed varies.
NEWEST_COST_WEIGHT = 0.5

_ALLOWED = (
    'a number of steps, a datetime.timedelta, or text such as "100 steps", "30 seconds", '
    '"10 min", "2 hours", "epoch", "2 epochs" or "auto"'
)
_TEXT = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,15})?)?\s*(?P<unit>[a-z]+)")
_SECONDS_IN = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_WHOLE_UNITS: dict[str, Unit] = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
}


@dataclass(frozen=True)
class Interval:
    """What `every=` means. `amount` is a whole number of steps or epochs; "auto" has none."""

    unit: Unit
    amount: float = 1

    def __str__(self) -> str:
        if self.unit == "auto":
            return "auto"
        return f"{self.amount:.15g} {self.unit[:-1] if self.amount == 1 else self.unit}"


def parse_every(every: int | str | timedelta | Interval) -> Interval:
    """`every=` as users write it: steps as a number, all else with its unit."""
    match every:
        case Interval():
            return _checked(every, every)
        case bool():
            raise ParameterError("every", every, _ALLOWED)
        case timedelta():
            return _checked(every, Interval("seconds", every.total_seconds()))
        case str():
            return _parse_text(every)
        case SupportsIndex():
            return _checked(every, Interval("steps", operator.index(every)))
        case float():
            raise ParameterError(
                "every", every, _ALLOWED, 'A fraction needs its unit, such as "2.5 seconds"'
            )
        case _:
            raise ParameterError("every", every, _ALLOWED)


def _parse_text(text: str) -> Interval:
    found = _TEXT.fullmatch(text.strip().lower())
    if not found:
        raise ParameterError("every", text, _ALLOWED, "A number in text needs its unit")
    number, unit = found["number"], found["unit"]
    if unit == "auto" and number is None:
        return Interval("auto")
    if unit in _SECONDS_IN:
        return _checked(text, Interval("seconds", float(number or 1) * _SECONDS_IN[unit]))
    if unit in _WHOLE_UNITS:
        if number and "." in number:
            raise ParameterError("every", text, f"a whole number of {_WHOLE_UNITS[unit]}")
        return _checked(text, Interval(_WHOLE_UNITS[unit], int(number or 1)))
    raise ParameterError("every", text, _ALLOWED)


def _checked(given: object, every: Interval) -> Interval:
    if not 0 < every.amount < math.inf:
        raise ParameterError("every", given, f"more than 0 {every.unit}")
    return every


def young_daly(cost_seconds: float, failure_seconds: float) -> float:
    """Return Daly's optimal interval for a checkpoint cost and a mean time between failures."""
    if cost_seconds >= 2 * failure_seconds:
        return failure_seconds
    x = math.sqrt(cost_seconds / (2 * failure_seconds))
    return math.sqrt(2 * cost_seconds * failure_seconds) * (1 + x / 3 + x * x / 9) - cost_seconds


def expected_failure_seconds(failures: int, elapsed_seconds: float) -> float:
    """Return the mean time between failures, from those observed and a weak prior of one a day.

    It is the posterior mean rate of a Poisson process with a gamma prior: a failure in the first
    hour changes it a lot, and so does a day without any.
    """
    return (PRIOR_SECONDS + elapsed_seconds) / (PRIOR_FAILURES + failures)


def auto_interval(cost_seconds: float, failure_seconds: float, highest_overhead: float) -> float:
    """Return the Young/Daly interval within its bounds; the bound on the overhead wins."""
    best = min(young_daly(cost_seconds, failure_seconds), LONGEST_SECONDS)
    return max(best, SHORTEST_SECONDS, cost_seconds / highest_overhead)


class CheckpointSchedule:
    """Tells the training thread when a checkpoint is due. It holds no clock: callers say `now`.

    A checkpoint that is due stays due until it is `taken`, so a caller that still has a write in
    flight may continue and ask again after the next step.

    The cost of a checkpoint is the full time of its copy and of its write. The write runs in the
    background, but it hashes and sends on the same cores and the same network, and the checkpoint
    protects nothing until it has ended. Where cores are idle this overstates the cost, which makes
    checkpoints rarer, never the run slower.

    `step` and `epoch` are where this submission begins; `failures` and `elapsed_seconds` count what
    the run had before it. `failure_seconds`, the mean time between failures, replaces the estimate.
    `epoch_ends` makes the end of each epoch due as well, whatever `every` says.
    """

    def __init__(
        self,
        every: Interval,
        now: float,
        *,
        step: int = 0,
        epoch: int = 0,
        failures: int = 0,
        elapsed_seconds: float = 0.0,
        failure_seconds: float | None = None,
        epoch_ends: bool = False,
    ) -> None:
        self.every = every
        self.cost_seconds: float | None = None  # smoothed; None until one was written
        self._started = self._taken_at = now
        self._elapsed_before = elapsed_seconds
        self._failures = failures
        self._given_failure_seconds = check_failure_seconds(failure_seconds)
        self._epoch_ends = epoch_ends
        self._step_of_last, self._epoch_of_last, self._epoch = step, epoch, epoch
        # `taken` comes from the training thread and `costed` from the writing one; the checks
        # after each step read one number each and need no lock.
        self._lock = threading.Lock()
        self._due_step = self._due_at = math.inf
        self._set_due()

    def due_after_step(self, step: int, now: float) -> bool:
        """Whether one is due by the caller's clock: let one rank ask, and tell the others."""
        return step >= self._due_step or now >= self._due_at

    def due_after_epoch(self, epoch: int) -> bool:
        """Whether one is due by the count of epochs, which is the same on every rank.

        `epoch` is 1 after the first. Where seconds decide, the end of an epoch is never due: the
        step before or after it is as good a time.
        """
        self._epoch = epoch
        if self._epoch_ends:
            return epoch > self._epoch_of_last
        if self.every.unit != "epochs":
            return False
        # Multiples, not distances: resumed and uninterrupted runs take the same checkpoints.
        return epoch // self.every.amount > self._epoch_of_last // self.every.amount

    def taken(self, step: int, now: float) -> None:
        """Record that the state was copied at `step`."""
        with self._lock:
            self._step_of_last, self._epoch_of_last = step, self._epoch
            self._taken_at = now
            self._set_due()

    def costed(self, copy_seconds: float, write_seconds: float) -> None:
        """Record the cost of a write that has ended. May be called from any thread."""
        newest = copy_seconds + write_seconds
        with self._lock:
            if self.cost_seconds is None:
                self.cost_seconds = newest
            else:
                self.cost_seconds += NEWEST_COST_WEIGHT * (newest - self.cost_seconds)
            self._set_due()

    @property
    def failure_seconds(self) -> float:
        """The mean time between failures that "auto" assumes."""
        if self._given_failure_seconds is not None:
            return self._given_failure_seconds
        elapsed = self._elapsed_before + self._taken_at - self._started
        return expected_failure_seconds(self._failures, elapsed)

    @property
    def interval_seconds(self) -> float:
        """The time between two checkpoints; infinite where steps or epochs decide."""
        if self.every.unit == "seconds":
            return self.every.amount
        if self.every.unit != "auto":
            return math.inf
        if self.cost_seconds is None:
            return FIRST_SECONDS
        expects_failures = self._failures > 0 or self._given_failure_seconds is not None
        return auto_interval(
            self.cost_seconds,
            self.failure_seconds,
            OVERHEAD_WITH_FAILURES if expects_failures else OVERHEAD_WITHOUT_FAILURES,
        )

    def _set_due(self) -> None:
        self._due_at = self._taken_at + self.interval_seconds
        if self.every.unit == "steps":
            amount = int(self.every.amount)
            self._due_step = (self._step_of_last // amount + 1) * amount


def check_failure_seconds(failure_seconds: float | None) -> float | None:
    """`failure_seconds=` as users write it."""
    if failure_seconds is None:
        return None
    number = isinstance(failure_seconds, (int, float)) and not isinstance(failure_seconds, bool)
    if not number or not (0 < failure_seconds < math.inf):
        raise ParameterError(
            "failure_seconds",
            failure_seconds,
            "the mean number of seconds between failures, more than 0",
            "Leave it out to estimate it from the run's own failures",
        )
    return float(failure_seconds)
