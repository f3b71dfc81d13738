"""Every exception class that sparkdml raises, and checks of arguments that raise them.

All exceptions can be pickled. The checks are pure; each raises a ParameterError.
"""

from __future__ import annotations

from typing import Any


class SparkDMLError(Exception):
    """Base class of all errors that sparkdml raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ calls the constructor with `args`, which is the formatted
        # message: that is wrong for constructors that take fields.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[SparkDMLError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ParameterError(SparkDMLError, ValueError):
    """A parameter has an invalid value; names the parameter, the value and what is allowed."""

    def __init__(self, parameter: str, value: object, allowed: str, fix: str = "") -> None:
        self.parameter = parameter
        self.value_text = repr(value)
        message = f"{parameter} must be {allowed} but got {value!r}"
        super().__init__(f"{message}. {fix}" if fix else message)


class DataError(SparkDMLError, ValueError):
    """The rows or their schema are not usable; names the column and, if known, the row."""


class SetupError(SparkDMLError, RuntimeError):
    """The cluster, the session or the machine isn't set up correctly; the message has the fix."""


class SparkEndedRun(SparkDMLError, RuntimeError):
    """The run's jobs were cancelled in Spark, or Spark's own driver process is gone."""


class NotEnoughSlots(SetupError):
    """There are fewer task slots than workers, so a barrier job would never start."""


class DryRunError(SparkDMLError, RuntimeError):
    """Training on a few rows in the driver failed; names the stage, the shapes and the cause."""


class CheckpointError(SparkDMLError, RuntimeError):
    """A checkpoint can't be written, read or resumed from; the message has the fix."""


class StoreError(CheckpointError):
    """The checkpoint store could not be reached, or refused an operation."""


class ExportError(SparkDMLError, RuntimeError):
    """A model can't be exported, or the exported model computes different outputs."""


class CommunicationError(SparkDMLError, RuntimeError):
    """A collective failed, nearly always because another rank is gone: seldom the root cause."""


class ProtocolError(SparkDMLError, ValueError):
    """A task and the driver don't understand each other: there is no such message or question.

    A driver service raises it for a question that it doesn't know. Then `ctx.ask` raises it in the
    task that asked, while any other exception of a driver service ends the run.
    """


class NonFiniteLoss(SparkDMLError, ArithmeticError):
    """The loss became NaN or infinite."""

    def __init__(self, loss: float, epoch: int, step: int, rank: int) -> None:
        self.loss, self.epoch, self.step, self.rank = loss, epoch, step, rank
        super().__init__(
            f"the loss is {loss} at step {step} (epoch {epoch}) on rank {rank}. "
            "Lower the learning rate, set clipNorm, or look for NaN or infinity in the columns."
        )


def task_name(role: str, rank: int) -> str:
    """How messages name a task: "rank 1" for a worker, "server 0" for a task of another role."""
    return f"rank {rank}" if role == "worker" else f"{role} {rank}"


class WorkerError(SparkDMLError, RuntimeError):
    """A worker failed: its rank, its host, and the traceback as it was there.

    A server or an evaluator that fails is one, too: `role` says which, and `rank` counts the tasks
    of that role.
    """

    step: int | None = None  # after which it failed, where it could tell

    def __init__(
        self,
        rank: int,
        host: str,
        reason: str,
        worker_traceback: str = "",
        role: str = "worker",
    ) -> None:
        self.rank, self.host, self.reason, self.role = rank, host, reason, role
        self.worker_traceback = worker_traceback
        who = f"{task_name(role, rank)} on {host}"
        message = f"{who} failed: {reason}"
        if worker_traceback:
            message += f"\n\nTraceback of {who}:\n{worker_traceback.rstrip()}"
        super().__init__(message)


class WorkerLost(WorkerError):
    """A worker's process died or stopped responding, so there is no traceback from it."""


def check_whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ParameterError(name, value, f"a whole number of at least {least}")
    return value


def check_seconds(name: str, value: float, or_zero: bool = False) -> float:
    if not (value > 0 or (or_zero and value == 0)):
        raise ParameterError(name, value, "0 or more seconds" if or_zero else "more than 0 seconds")
    return value
