"""Every error that sparkdml raises by itself. All of them survive pickling."""

from __future__ import annotations

from typing import Any


class SparkDMLError(Exception):
    """Base of all errors that sparkdml raises by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ calls the constructor with `args`, which is the formatted
        # message: wrong for constructors that take fields.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[SparkDMLError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ParameterError(SparkDMLError, ValueError):
    """A parameter has a value that is not allowed: which, what, what is allowed, the fix."""

    def __init__(self, parameter: str, value: object, allowed: str, fix: str = "") -> None:
        self.parameter = parameter
        self.value_text = repr(value)
        message = f"{parameter} must be {allowed} but got {value!r}"
        super().__init__(f"{message}. {fix}" if fix else message)


class DataError(SparkDMLError, ValueError):
    """The rows or their schema can't be trained on; names the column and, where known, the row."""


class SetupError(SparkDMLError, RuntimeError):
    """The cluster, the session or the machine isn't ready; the message says how to make it so."""


class NotEnoughSlots(SetupError):
    """Fewer task slots than workers: a barrier job would wait for ever."""


class DryRunError(SparkDMLError, RuntimeError):
    """A few rows did not come through the model at the driver: the stage, the shapes, the cause."""


class CheckpointError(SparkDMLError, RuntimeError):
    """A checkpoint can't be written, read, or gone on from; the message says how to go on."""


class StoreError(CheckpointError):
    """The place of the checkpoints could not be reached, or would not do what was asked."""


class ExportError(SparkDMLError, RuntimeError):
    """A model can't be written in another format, or what was written computes something else."""


class CommunicationError(SparkDMLError, RuntimeError):
    """A collective failed, nearly always because a peer is gone: an effect, seldom the cause."""


class NonFiniteLoss(SparkDMLError, ArithmeticError):
    """The loss became NaN or infinite."""

    def __init__(self, loss: float, epoch: int, step: int, rank: int) -> None:
        self.loss, self.epoch, self.step, self.rank = loss, epoch, step, rank
        super().__init__(
            f"the loss is {loss} at step {step} (epoch {epoch}) on rank {rank}. "
            "Lower the learning rate, set clipNorm, or look for NaN or infinity in the columns."
        )


class WorkerError(SparkDMLError, RuntimeError):
    """A worker failed: its rank, its host, and the traceback as it was there."""

    step: int | None = None  # after which it failed, where it could tell

    def __init__(self, rank: int, host: str, reason: str, worker_traceback: str = "") -> None:
        self.rank, self.host, self.reason = rank, host, reason
        self.worker_traceback = worker_traceback
        message = f"rank {rank} on {host} failed: {reason}"
        if worker_traceback:
            message += f"\n\nTraceback of rank {rank} on {host}:\n{worker_traceback.rstrip()}"
        super().__init__(message)


class WorkerLost(WorkerError):
    """A worker's process died or stopped answering, so there is no traceback of its own."""
