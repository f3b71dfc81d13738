"""The results of the chaos run: when the driver learned of each fault, and how the fault ended."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_faults import NAMES, Fault, mark_of
from benchmarks.chaos_world import Disk, ObjectStore

LONGEST_OUTAGE_SECONDS = 30.0
NOTHING = "-"


@dataclass
class Log:
    """When the driver learned of faults."""

    disk: Disk
    store: ObjectStore
    failures: list[tuple[float, str]] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)
    warnings: list[tuple[float, str]] = field(default_factory=list)
    is_shut: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, fault: Fault) -> None:
        if fault.kind == "full disk":
            self.disk.fill()
        else:
            self.is_shut.set()
            self.store.authenticator.shut()
            timer = threading.Timer(LONGEST_OUTAGE_SECONDS, self._reopen)
            timer.daemon = True
            timer.start()

    def _reopen(self) -> None:
        with self._lock:
            if self.is_shut.is_set():
                self.is_shut.clear()
                self.store.authenticator.unlock()

    def on_event(self, rank: int, message: dict[str, Any]) -> None:
        if message.get("kind") == "failure":
            self.failures.append((time.time(), message["cause"]))
            print(f"    {message['cause'][:150]}", file=sys.stderr)
            self.disk.free()
        elif message.get("kind") == "checkpoint":
            self.commits.append((time.time(), message["step"]))

    def on_warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        text = str(message)
        self.warnings.append((time.time(), text))
        if "could not be written" in text and self.is_shut.is_set():
            print(f"    {text[:250]}", file=sys.stderr)
            self._reopen()


@dataclass(frozen=True)
class Outcome:
    """How one fault ended."""

    fault: Fault
    detected: float | None  # seconds after it
    resumed: float | None
    replayed: int | None
    safe_again: float | None = None

    @property
    def is_right(self) -> bool:
        if self.fault.kind == "store cut off":
            return self.detected is not None and self.safe_again is not None
        return self.detected is not None and self.resumed is not None


def judge(schedule: Sequence[Fault], folder: Path, log: Log, lineage: Any) -> list[Outcome]:
    lines = (folder / "first-steps.jsonl").read_text().splitlines()
    first_steps = [(entry["time"], entry["step"]) for entry in map(json.loads, lines)]
    failed = [s for s in lineage.submissions if s.outcome == "failed"]
    outcomes = []
    for fault in schedule:
        mark = folder / mark_of(fault)
        if not mark.exists():
            outcomes.append(Outcome(fault, None, None, None))
            continue
        struck = mark.stat().st_mtime
        if fault.kind == "store cut off":
            struck = mark.with_suffix(".done").stat().st_mtime
            lost = [at for at, text in log.warnings if at > struck and "could not be wr" in text]
            safe = [at for at, _ in log.commits if lost and at > lost[0]]
            detected = lost[0] - struck if lost else None
            outcomes.append(Outcome(fault, detected, None, 0, safe[0] - struck if safe else None))
            continue
        known = [at for at, _ in log.failures if at > struck]
        first = [(at, step) for at, step in first_steps if at > (known[0] if known else struck)]
        reached = [s.failed_at_step for s in failed if known and s.ended > known[0]]
        last = (reached[0] if reached else None) or fault.step
        outcomes.append(
            Outcome(
                fault,
                known[0] - struck if known else None,
                first[0][0] - struck if first else None,
                last - (first[0][1] - 1) if first else None,
            )
        )
    return outcomes


def to_markdown(outcomes: Sequence[Outcome]) -> str:
    def seconds(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.1f}"

    lines = [
        "| fault | after step | rank | detected, s | resumed, s | steps replayed |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        resumed = seconds(each.resumed)
        if each.fault.kind == "store cut off":
            resumed = f"never stopped; safe again {seconds(each.safe_again)}"
        replayed = NOTHING if each.replayed is None else str(each.replayed)
        lines.append(
            f"| {NAMES[each.fault.kind]} | {each.fault.step} | {each.fault.rank} | "
            f"{seconds(each.detected)} | {resumed} | {replayed} |"
        )
    return "\n".join(lines) + "\n"
