"""Fault injection: callbacks that make one rank fail after one step."""

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
    """The exception that the fault "raise" raises."""


class FaultAt(Callback):
    """A fault on one rank, after one step.

    Args:
        rank, step: where and when.
        kind: "raise" an exception, "kill" the Python worker with -9, "kill-executor" its JVM, or
            "stop" the worker with SIGSTOP, so that it no longer responds.
        folder: a folder in which faults are recorded, so that a restarted run does not repeat them.
        times: how often the fault occurs.
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
        return "FaultAt()"  # the arguments don't change what is trained


class FailsAt(Callback):
    """Raises on one rank every time that it has made a given step; never with step=0."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, training: TrainingRun) -> None:
        if (training.ctx.rank, training.step) == (self.rank, self.step):
            raise Injected(f"rank {self.rank} at step {self.step}")

    def __repr__(self) -> str:
        return "FailsAt()"  # the arguments don't change what is trained


class StopAt(Callback):
    """Requests the end of the run on one rank, after one step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, training: TrainingRun) -> None:
        if (training.ctx.rank, training.step) == (self.rank, self.step):
            training.request_stop("a test asked")

    def __repr__(self) -> str:
        return "StopAt()"  # the arguments don't change what is trained


def strike(kind: Kind) -> None:
    """Inject the fault into this process or its executor."""
    if kind == "raise":
        raise Injected("an injected fault")
    if kind == "kill-executor":
        os.kill(executor_of(os.getpid()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def executor_of(pid: int) -> int:
    """Return the PID of the JVM to which a Python worker belongs."""
    for parent in psutil.Process(pid).parents():
        if parent.name() == "java":
            return int(parent.pid)
    raise ProcessLookupError(f"process {pid} has no JVM above it")
