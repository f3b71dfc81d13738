"""Stragglers: which rank held up the others, by how much, and why.

In a synchronous step all ranks wait for the slowest, and that wait is counted as *communication* of
the fast ranks. So ranks are compared by the rest of their time, which is their own.

Runs in the driver: `Stragglers` is an observer, which keeps the sums of each rank for one run; all
else is pure and works on such sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

# Equal ranks differ by a tenth or so from step to step (caches, other tenants of a host); from a
# quarter on, there is a cause that can be found.
SLOWER = 1.25
# Less is not worth acting on, and is often lost in the first steps (libraries load, caches fill).
MIN_SECONDS_LOST = 1.0
# A rank may be far slower in what hardly takes time: only what lengthens the run counts.
MIN_SHARE_LOST = 0.05

_ADVICE = {
    "data": "it waits for rows: look at its source and disk, or prepare the rows before the fit",
    "compute": "its own steps take longer: look at what else runs on its cores or GPU",
    "host": "all ranks of that host are slow: look at its load, clock and memory, or exclude it",
    "checkpoint": "it takes longer to write checkpoints: look at its connection to the store",
    "other": "its time goes to callbacks, validation or metrics: make those cheaper on this rank",
}


@dataclass
class Times:
    """The sums of what one rank has reported so far."""

    host: str
    steps: int = 0
    rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the numbers of a "rank" event."""
        self.steps += int(event["steps"])
        self.rows += int(event["rows"])
        for part, seconds in event["seconds"].items():
            self.seconds[part] = self.seconds.get(part, 0.0) + float(seconds)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def own(self) -> dict[str, float]:
        """Seconds per step of each part that is not a wait for other ranks."""
        return {
            part: seconds / max(self.steps, 1)
            for part, seconds in self.seconds.items()
            if part != "communication"
        }


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for."""

    rank: int
    host: str
    slower: float  # times the median of the other ranks' own time per step
    why: str  # "data", "compute", "checkpoint", "other", or "host": all ranks of it are slow
    seconds_lost: float  # how much longer its steps took than those of the others
    more_rows: float = 1.0  # times the rows per step of the others

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Straggler:
        return cls(**told)

    def __str__(self) -> str:
        advice = _ADVICE[self.why]
        if self.more_rows >= SLOWER and self.why != "data":
            advice = f"it has {self.more_rows:.1f} times the rows of the others in each step"
        return (
            f"rank {self.rank} on {self.host} took {self.slower:.1f} times as long as the others "
            f"({self.seconds_lost:,.1f} s lost, {self.why}): {advice}"
        )


def find_stragglers(ranks: Mapping[int, Times]) -> list[Straggler]:
    """Ranks that are slower than the others by more than chance, the worst first."""
    working = {rank: times for rank, times in ranks.items() if times.steps}
    found = [
        straggler
        for rank, times in working.items()
        if len(working) > 1
        and (straggler := _judge(rank, times, [t for r, t in working.items() if r != rank]))
    ]
    slow_hosts = _slow_hosts(working, {straggler.rank for straggler in found})
    found = [replace(s, why="host") if s.host in slow_hosts else s for s in found]
    return sorted(found, key=lambda straggler: -straggler.seconds_lost)


def _judge(rank: int, times: Times, others: list[Times]) -> Straggler | None:
    mine = sum(times.own.values())
    usual = median(sum(other.own.values()) for other in others)
    lost = (mine - usual) * times.steps
    if mine < SLOWER * usual or lost < max(MIN_SECONDS_LOST, MIN_SHARE_LOST * times.total):
        return None
    excess = {
        part: seconds - median(other.own.get(part, 0.0) for other in others)
        for part, seconds in times.own.items()
    }
    rows = median(other.rows / other.steps for other in others)
    return Straggler(
        rank=rank,
        host=times.host,
        slower=round(mine / max(usual, 1e-9), 2),
        why=max(excess, key=lambda part: excess[part]),
        seconds_lost=round(lost, 3),
        more_rows=round(times.rows / times.steps / rows, 2) if rows else 1.0,
    )


def _slow_hosts(ranks: Mapping[int, Times], slow: set[int]) -> set[str]:
    """Hosts of several ranks that are all slow, where another host has no slow rank."""
    members: dict[str, list[int]] = {}
    for rank, times in ranks.items():
        members.setdefault(times.host, []).append(rank)
    healthy = any(slow.isdisjoint(on_host) for on_host in members.values())
    return {
        host
        for host, on_host in members.items()
        if healthy and len(on_host) > 1 and slow.issuperset(on_host)
    }


class Stragglers:
    """An observer that can report at any time which ranks hold up the run.

    Each submission is judged by itself, since ranks may be on other hosts after a restart; the
    report has the worst of each rank on each host.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, Times] = {}
        self._before: list[Straggler] = []

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "rank":
            self._ranks.setdefault(rank, Times(event["host"])).add(event)
        elif event["kind"] in ("restart", "submission"):
            self._before = self.report()
            self._ranks = {}

    def report(self) -> list[Straggler]:
        # A copy: this may be called on another thread than `handle`.
        return _worst([*self._before, *find_stragglers(dict(self._ranks))])

    def close(self) -> None:
        """The report stays available."""


def _worst(found: Iterable[Straggler]) -> list[Straggler]:
    worst: dict[tuple[int, str], Straggler] = {}
    for straggler in sorted(found, key=lambda straggler: -straggler.seconds_lost):
        worst.setdefault((straggler.rank, straggler.host), straggler)
    return list(worst.values())


MAX_RANKS = 16


def describe_ranks(ranks: Mapping[int, Times]) -> list[str]:
    """A line per rank, in order: where its time went. Of many ranks, the slowest."""
    shown = sorted(ranks, key=lambda rank: -sum(ranks[rank].own.values()))[:MAX_RANKS]
    lines = [_describe(rank, ranks[rank]) for rank in sorted(shown)]
    if len(ranks) > MAX_RANKS:
        lines.append(f"… and {len(ranks) - MAX_RANKS:,} ranks with shorter steps")
    return lines


def _describe(rank: int, times: Times) -> str:
    total = times.total
    shares = ", ".join(
        f"{part} {seconds / total:.0%}"
        for part, seconds in times.seconds.items()
        if seconds > 0.005 * total
    )
    rate = f"{times.rows / total:,.0f} samples/s" if total else "no time"
    return f"rank {rank} on {times.host}: {times.steps:,} steps, {times.rows:,} samples, {rate}" + (
        f"; {shares}" if shares else ""
    )
