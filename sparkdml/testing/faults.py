"""Faults on purpose: a callback that makes one rank fail after one step, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

import psutil

from sparkdml.errors import ParameterError
from sparkdml.training.callbacks import Callback
from sparkdml.training.run import TrainingRun

Kind = Literal["raise", "kill", "kill-executor", "stop"]
KINDS = ("raise", "kill", "kill-executor", "stop")


class Injected(RuntimeError):
    """What the fault "raise" raises."""


class FaultAt(Callback):
    """One fault, at one rank, after one step.

    Args:
        rank, step: where and when.
        kind: "raise" an exception, "kill" the Python worker with -9, "kill-executor" its JVM, or
            "stop" the worker with SIGSTOP, so that it no longer answers.
        folder: remembers on disk that it has happened, so that a restarted run comes through.
        times: how often it happens before it is over.
    """

    def __init__(self, rank: int, step: int, kind: Kind, folder: str, times: int = 1) -> None:
        if kind not in KINDS:
            raise ParameterError("kind", kind, f"one of {', '.join(map(repr, KINDS))}")
        self.rank, self.step, self.kind, self.folder, self.times = rank, step, kind, folder, times

    def on_step_end(self, training: TrainingRun) -> None:
        if training.ctx.rank == self.rank and training.step == self.step and self._strikes():
            strike(self.kind)

    def _strikes(self) -> bool:
        for attempt in range(self.times):
            mark = Path(self.folder, f"fault-{self.rank}-{self.step}-{self.kind}-{attempt}")
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def __repr__(self) -> str:
        return "FaultAt()"  # its details are no part of what is trained


class FailsAt(Callback):
    """Raises at one rank, each time that it is after one step; at step 0 it never does."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, training: TrainingRun) -> None:
        if (training.ctx.rank, training.step) == (self.rank, self.step):
            raise Injected(f"rank {self.rank} at step {self.step}")

    def __repr__(self) -> str:
        return "FailsAt()"  # when is no part of what is trained


class StopAt(Callback):
    """Asks for the run's end at one rank, after one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, training: TrainingRun) -> None:
        if (training.ctx.rank, training.step) == (self.rank, self.step):
            training.request_stop("a test asked")

    def __repr__(self) -> str:
        return "StopAt()"  # when is no part of what is trained


def strike(kind: Kind) -> None:
    """Do it, to this very process or to its executor."""
    if kind == "raise":
        raise Injected("a fault that was asked for")
    if kind == "kill-executor":
        os.kill(executor_of(os.getpid()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def executor_of(pid: int) -> int:
    """The JVM that a Python worker belongs to."""
    for parent in psutil.Process(pid).parents():
        if parent.name() == "java":
            return int(parent.pid)
    raise ProcessLookupError(f"process {pid} has no JVM above it")
