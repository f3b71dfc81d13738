"""The faults of the chaos run: their kinds, their schedule, and how they are caused."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sparkdml as dml
from sparkdml.testing.faults import FaultAt

Kind = Literal["kill-executor", "kill", "raise", "stop", "full disk", "store cut off"]
BY_THE_WORKER: tuple[Kind, ...] = ("kill-executor", "kill", "raise", "stop")
FROM_OUTSIDE: tuple[Kind, ...] = ("full disk", "store cut off")
NAMES: dict[Kind, str] = {
    "kill-executor": "kill -9 of an executor",
    "kill": "kill -9 of a Python worker",
    "raise": "an exception",
    "stop": "SIGSTOP of a worker",
    "full disk": "a full local disk",
    "store cut off": "an unreachable store",
}
ACKNOWLEDGE_SECONDS = 30.0


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule: after this step, by this rank."""

    step: int
    rank: int
    kind: Kind


def num_stretches(count: int, kinds: Sequence[Kind]) -> int:
    """Return how long the run must be for this number of faults."""
    return sum(_stretches(kind) for kind in _in_turn(count, kinds))


def make_schedule(
    count: int, kinds: Sequence[Kind], steps: int, steps_per_epoch: int, num_workers: int, seed: int
) -> list[Fault]:
    """Schedule every kind in turn, at random steps apart; a disk fills while it is in use."""
    dice = random.Random(seed)
    chosen = _in_turn(count, kinds)
    early = [kind for kind in chosen if kind == "full disk"]
    late = [kind for kind in chosen if kind != "full disk"]
    dice.shuffle(late)
    faults = _spread(early, 5, steps_per_epoch // 2, num_workers, dice)
    faults += _spread(late, steps_per_epoch, steps - steps_per_epoch // 2, num_workers, dice)
    return sorted(faults, key=lambda fault: fault.step)


def _in_turn(count: int, kinds: Sequence[Kind]) -> list[Kind]:
    return [kinds[index % len(kinds)] for index in range(count)]


def _stretches(kind: Kind) -> int:
    """Training continues without its store, so the next fault must come some time later."""
    return 5 if kind == "store cut off" else 1


def _spread(
    kinds: Sequence[Kind], first: int, last: int, num_workers: int, dice: random.Random
) -> list[Fault]:
    lengths = [_stretches(kind) for kind in kinds]
    faults = []
    for index, kind in enumerate(kinds):
        stretch = (last - first) // sum(lengths)
        begin = first + stretch * sum(lengths[:index])
        step = dice.randrange(begin, begin + max(1, stretch // 2))
        faults.append(Fault(step, dice.randrange(num_workers), kind))
    return faults


class OutsideFault(dml.Callback):
    """Asks for a fault that no worker can do by itself, and waits until it is done."""

    def __init__(self, fault: Fault, folder: str) -> None:
        self.fault, self.folder = fault, folder

    def on_step_end(self, training: Any) -> None:
        fault = self.fault
        if training.step != fault.step or training.ctx.rank != fault.rank:
            return
        wish = Path(self.folder, mark_of(fault))
        try:
            wish.touch(exist_ok=False)
        except FileExistsError:
            return  # it has happened before the run was restarted
        deadline = time.monotonic() + ACKNOWLEDGE_SECONDS
        while not wish.with_suffix(".done").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{fault.kind!r} was never injected")
            time.sleep(0.01)

    def __repr__(self) -> str:
        return "OutsideFault()"


class FirstSteps(dml.Callback):
    """Rank 0 records when it has made the first step of each submission."""

    def __init__(self, folder: str, seconds_a_step: float) -> None:
        self.folder, self.seconds_a_step = folder, seconds_a_step
        self._is_first = True

    def on_run_start(self, training: Any) -> None:
        self._is_first = True

    def on_step_end(self, training: Any) -> None:
        time.sleep(self.seconds_a_step)  # a step of a real model takes its time
        if training.ctx.rank == 0 and self._is_first:
            self._is_first = False
            with open(Path(self.folder, "first-steps.jsonl"), "a") as file:
                file.write(json.dumps({"time": time.time(), "step": training.step}) + "\n")

    def __repr__(self) -> str:
        return "FirstSteps()"


def mark_of(fault: Fault) -> str:
    return f"fault-{fault.rank}-{fault.step}-{fault.kind.replace(' ', '-')}-0"


def callbacks_for(schedule: Sequence[Fault], folder: str) -> list[dml.Callback]:
    return [
        OutsideFault(fault, folder)
        if fault.kind in FROM_OUTSIDE
        else FaultAt(fault.rank, fault.step, fault.kind, folder)  # type: ignore[arg-type]
        for fault in schedule
    ]


class Outside(threading.Thread):
    """Watches for requested faults, and causes them."""

    def __init__(
        self,
        schedule: Sequence[Fault],
        folder: Path,
        strike: Callable[[Fault], None],
    ) -> None:
        super().__init__(name="chaos", daemon=True)
        self._waiting = [fault for fault in schedule if fault.kind in FROM_OUTSIDE]
        self._folder, self._strike = folder, strike
        self._over = threading.Event()

    def run(self) -> None:
        while self._waiting and not self._over.wait(0.02):
            for fault in list(self._waiting):
                wish = self._folder / mark_of(fault)
                if wish.exists():
                    self._strike(fault)
                    wish.with_suffix(".done").touch()
                    self._waiting.remove(fault)

    def end(self) -> None:
        self._over.set()
        self.join()
