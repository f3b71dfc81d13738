"""Failures at the driver: whether to restart the run, and how a failure is described.

Pure functions and the count of restarts, used by the thread that watches the run. A job that failed
before our code ran in it has only Spark's report, which is turned into an error with a fix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sparkdml.errors import (
    CheckpointError,
    DataError,
    NonFiniteLoss,
    NotEnoughSlots,
    ParameterError,
    SetupError,
    SparkDMLError,
    SparkEndedRun,
    StoreError,
    WorkerError,
    WorkerLost,
)

# Another attempt from the same state would fail in the same way.
_DETERMINISTIC = (
    CheckpointError,
    DataError,
    NonFiniteLoss,
    NotEnoughSlots,
    ParameterError,
    SparkEndedRun,
)


def is_deterministic(kind: type) -> bool:
    """Whether another attempt would fail in the same way."""
    return issubclass(kind, _DETERMINISTIC) and not issubclass(kind, StoreError)


@dataclass
class Restarts:
    """Counts failures since the last progress: since the newest checkpoint is a newer one."""

    max_restarts: int
    total: int = 0
    recent: list[Exception] = field(default_factory=list)  # without progress
    _newest_step: int = -1
    _seen: set[tuple[str, int]] = field(default_factory=set)

    @property
    def count(self) -> int:
        return len(self.recent)

    @property
    def first_cause(self) -> Exception | None:
        return self.recent[0] if self.recent else None

    def why_not(self, error: Exception, newest_step: int, start_step: int) -> str | None:
        """Why not to try again after this failure, or None to do so."""
        if newest_step > self._newest_step:
            self._newest_step, self.recent = newest_step, []
        self.recent.append(error)
        self.total += 1
        if is_deterministic(type(error)) or not isinstance(error, SparkDMLError):
            return "another attempt would fail in the same way"
        step = failed_step(error)
        # The reporter may not know of a step: a server, a task that has just started, Spark itself.
        reached = max(step or 0, newest_step)
        may_be_luck = isinstance(error, WorkerLost | StoreError) or follows_from_loss(error)
        if self.total == 1 and reached <= start_step and not may_be_luck:
            return "it failed before its first step, so the code or a setting is most likely wrong"
        if isinstance(error, WorkerError) and not may_be_luck and step is not None:
            key = (error.reason, reached)
            if key in self._seen:
                return f"the same error occurred twice at step {reached}, so the code is wrong"
            self._seen.add(key)
        if self.count > self.max_restarts:
            return (
                f"{self.count} failures without a new checkpoint (maxRestarts={self.max_restarts})"
            )
        return None

    def explain(self, error: Exception, refusal: str) -> Exception:
        """The first cause since the last progress, with all failures since then and the refusal."""
        cause = self.first_cause or error
        if self.total:
            failures = "1 failure" if self.total == 1 else f"{self.total} failures"
            cause.add_note(f"Given up after {failures}: {refusal}.")
        if self.count > 1:
            lines = [f"  {n}. {one_line(failure)}" for n, failure in enumerate(self.recent, 1)]
            cause.add_note("\n".join(["Failures since the last progress:", *lines]))
        return cause


def follows_from_loss(error: Exception) -> bool:
    """Whether a server gave up because others were lost; its own code is not to blame."""
    if not isinstance(error, WorkerError) or error.role == "worker":
        return False
    return error.reason.startswith("CommunicationError: ")


def failed_step(error: BaseException | None) -> int | None:
    """After which step a worker failed, if it could tell; tasks of other roles count no steps."""
    while error is not None:
        if isinstance(error, WorkerError) and error.step is not None and error.role == "worker":
            return error.step
        error = error.__cause__
    return None


def describe_failure(error: BaseException) -> dict[str, Any]:
    """A failure as an event, for the run's observers."""
    worker: BaseException | None = error
    while worker is not None and not isinstance(worker, WorkerError):
        worker = worker.__cause__
    known = worker if isinstance(worker, WorkerError) else None
    return {
        "kind": "failure",
        "cause": one_line(error),
        "failed_role": None if known is None else known.role,
        "failed_rank": None if known is None else known.rank,
        "host": None if known is None else known.host,
        "traceback": "" if known is None else known.worker_traceback[-10_000:],
        "step": failed_step(error),
    }


def one_line(error: BaseException) -> str:
    """A failure without its traceback."""
    return str(error).partition("\n")[0][:500]


def ended_by_spark(error: Exception) -> SparkEndedRun | None:
    """What a job's error says of a run that must not restart: it was cancelled, or lost its JVM."""
    from py4j.protocol import Py4JNetworkError

    if isinstance(error, Py4JNetworkError | ConnectionError):
        ended = SparkEndedRun(
            "Spark's driver process (the JVM of this session) has ended or no longer answers, "
            f"perhaps for lack of memory: {one_line(error) or type(error).__name__}. Start a new "
            "session (raise spark.driver.memory if memory was short); with checkpoint= the same "
            "fit then resumes from the newest checkpoint"
        )
    else:
        cancelled = re.search(r"\bJob \d+ (was )?cancelled[^\n]*", str(error))
        if cancelled is None:
            return None
        ended = SparkEndedRun(
            f"the run was cancelled in Spark: {cancelled[0].strip()}. With checkpoint= the same "
            "fit resumes from the newest checkpoint"
        )
    ended.__cause__ = error
    return ended


def with_spark_report(lost: WorkerLost, error: Exception | None) -> WorkerLost:
    """The loss of a process, with what Spark's report of its job says of how it ended."""
    text = "" if error is None else str(error)
    crash = re.search(r"Fatal Python error: ([^\n]+)", text)
    executor = re.search(r"ExecutorLostFailure[^\n]*?Reason: ([^\n]+)", text)
    if crash is not None:
        how, traceback = f"it crashed ({crash[1].strip()})", text[crash.start() :][:10_000]
    elif executor is not None:
        how, traceback = f"its executor was lost ({executor[1].strip()})", ""
    else:
        return lost
    before = lost.reason.partition(": ")[0]
    return WorkerLost(lost.rank, lost.host, f"{before}: {how}", traceback, lost.role)


def explain_spark_error(error: Exception, worker_python: str) -> Exception:
    """A failure that no worker could report, as our code never ran in it."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException | Py4JError):
        return error  # at the driver itself: a function that can't be pickled, for instance
    text = str(error)
    explained: Exception = WorkerError(-1, "an unknown host", f"Spark ended the job: {text}")
    for line in text.splitlines():
        unreachable = re.search(r"SetupError: ([\w ]+ \d+ on .* can't reach the driver.*)", line)
        if unreachable is not None:
            explained = SetupError(unreachable[1])
            break
        if "ModuleNotFoundError" in line or "PYTHON_VERSION_MISMATCH" in line:
            explained = SetupError(
                f"the workers' Python ({worker_python}) can't run the job: {line.strip()}. Set "
                "PYSPARK_PYTHON to a Python that has the driver's version, torch, pyarrow and "
                "sparkdml on every host, or ship them with --py-files or --archives"
            )
            break
    explained.__cause__ = error
    return explained
