"""Whether a failed run is worth another try: a decision, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparkdml.errors import (
    CheckpointError,
    DataError,
    NonFiniteLoss,
    NotEnoughSlots,
    ParameterError,
    SparkDMLError,
    StoreError,
    WorkerError,
    WorkerLost,
)

# Trained again from the same state, these would come again.
_CERTAIN_TO_COME_AGAIN = (
    CheckpointError,
    DataError,
    NonFiniteLoss,
    NotEnoughSlots,
    ParameterError,
)


def is_certain(kind: type) -> bool:
    """Whether an error of this kind would come again."""
    return issubclass(kind, _CERTAIN_TO_COME_AGAIN) and not issubclass(kind, StoreError)


@dataclass
class Restarts:
    """Counts failures since the last progress: since the newest checkpoint is a newer one."""

    max_restarts: int
    count: int = 0  # without progress
    total: int = 0
    first_cause: Exception | None = None
    _newest_step: int = -1
    _seen: set[tuple[str, int | None]] = field(default_factory=set)

    def why_not(self, error: Exception, newest_step: int, start_step: int) -> str | None:
        """Why not to try again after this failure, or None to do so."""
        if newest_step > self._newest_step:
            self._newest_step, self.count, self.first_cause = newest_step, 0, None
        self.count += 1
        self.total += 1
        if self.first_cause is None:
            self.first_cause = error
        if is_certain(type(error)) or not isinstance(error, SparkDMLError):
            return "it would come again"
        step = failed_step(error)
        may_be_luck = isinstance(error, WorkerLost | StoreError)
        if self.total == 1 and (step or 0) <= start_step and not may_be_luck:
            return "no step was made: most likely the code is wrong, or the setting"
        if isinstance(error, WorkerError) and not isinstance(error, WorkerLost):
            key = (error.reason, step)
            if key in self._seen:
                return f"the same error came twice at step {step}: the code is wrong"
            self._seen.add(key)
        if self.count > self.max_restarts:
            return (
                f"{self.count} failures without a new checkpoint (maxRestarts={self.max_restarts})"
            )
        return None


def failed_step(error: BaseException | None) -> int | None:
    """After which step a worker failed, if it could tell."""
    while error is not None:
        if isinstance(error, WorkerError) and error.step is not None:
            return error.step
        error = error.__cause__
    return None


def describe_failure(error: BaseException) -> dict[str, Any]:
    """A failure as an event, for whoever watches the run."""
    worker: BaseException | None = error
    while worker is not None and not isinstance(worker, WorkerError):
        worker = worker.__cause__
    known = worker if isinstance(worker, WorkerError) else None
    return {
        "kind": "failure",
        "cause": one_line(error),
        "failed_rank": None if known is None else known.rank,
        "host": None if known is None else known.host,
        "traceback": "" if known is None else known.worker_traceback[-10_000:],
        "step": failed_step(error),
    }


def one_line(error: BaseException) -> str:
    """A failure without its traceback."""
    return str(error).partition("\n")[0][:500]
