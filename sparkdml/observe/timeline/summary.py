"""The summary of a trace: the largest costs, by their share of the wall time, with advice on each.

Steps in a trace are a sample. So the cost of a part of the step is its share of the recorded steps,
times the time that was spent in steps; what is outside of steps is always recorded, and is summed.

Pure functions, used by the command line (`sparkdml timeline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdml.observe.timeline.trace_file import DRIVER_PID, TRAINING, track_of

STARTUP, RESTARTS, ENDING = "start-up", "restarts", "after the last span"
WAITING, OTHER = "waiting for the slowest rank", "other"
COMMUNICATION_LAP = "communication"

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """A share of the wall time, averaged over the ranks, and the rank where it is largest."""

    name: str
    share: float
    seconds: float  # of a rank, on average
    worst_rank: int
    worst_share: float


@dataclass(frozen=True)
class Summary:
    wall_seconds: float
    ranks: dict[int, str]  # their names
    num_steps: int  # recorded
    last_step: int
    num_failures: int
    num_restarts: int
    outcome: str
    costs: list[Cost]  # the largest first


@dataclass
class Rank:
    """The training thread of one rank."""

    steps: dict[tuple[float, int], dict[str, float]] = field(default_factory=dict)
    step_parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    in_steps: float = 0.0
    outside: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    begin: float = 0.0
    end: float = 0.0


def summarize(events: Iterable[Event]) -> Summary:
    spans: dict[int, list[Event]] = defaultdict(list)
    names: dict[int, str] = {}
    marks: list[Event] = []
    wall = 0.0
    for event in events:
        kind, pid = event.get("ph"), event.get("pid", 0)
        if kind == "M" and event.get("name") == "process_name" and pid != DRIVER_PID:
            names[pid] = str(event.get("args", {}).get("name", f"rank {pid}"))
        elif kind == "i":
            marks.append(event)
            wall = max(wall, event["ts"])
        elif kind == "X":
            wall = max(wall, event["ts"] + event["dur"])
            if track_of(event.get("tid", 0)) == TRAINING:
                spans[pid].append(event)
    restarts = sorted(m["ts"] for m in marks if m.get("cat") == "restart")
    ranks = {pid: read_rank(spans[pid], restarts) for pid in sorted(spans)}
    outcomes = [str(m["name"]).removeprefix("run ") for m in marks if m.get("cat") == "run-end"]
    steps = {key for rank in ranks.values() for key in rank.steps}
    return Summary(
        wall_seconds=wall / 1e6,
        ranks={pid: names.get(pid, f"rank {pid}") for pid in ranks},
        num_steps=len(steps),
        last_step=max((step for _, step in steps), default=0),
        num_failures=sum(m.get("cat") == "failure" for m in marks),
        num_restarts=len(restarts),
        outcome=outcomes[-1] if outcomes else "unfinished",
        costs=find_costs(ranks, wall),
    )


def read_rank(spans: list[Event], restarts: list[float]) -> Rank:
    """The times of one rank; of its spans only the outermost and the parts of steps count."""
    rank = Rank()
    spans = sorted(spans, key=lambda event: (event["ts"], -event["dur"]))
    rank.begin = spans[0]["ts"]
    rank.outside[STARTUP] = rank.begin
    outer_end = part_end = rank.begin
    parts: dict[str, float] | None = None
    for event in spans:
        begin, duration, name = event["ts"], event["dur"], event["name"]
        step = event.get("args", {}).get("step")
        if begin >= outer_end - 1e-2:  # it lies within no other
            crossed = [moment for moment in restarts if outer_end <= moment <= begin]
            if crossed:
                rank.outside[RESTARTS] += begin - outer_end
            outer_end, part_end = begin + duration, begin
            parts = None
            if name == "step" and step is not None:
                submission = sum(moment <= begin for moment in restarts)
                parts = rank.steps.setdefault((submission, step), {})
                rank.in_steps += duration
            elif step is None:  # else part of a step that did not end, counted with steps
                rank.outside[name] += duration
        elif parts is not None and begin >= part_end - 1e-2:
            part_end = begin + duration
            parts[name] = parts.get(name, 0.0) + duration
            rank.step_parts[name] += duration
        rank.end = max(rank.end, begin + duration)
    return rank


def find_costs(ranks: Mapping[int, Rank], wall: float) -> list[Cost]:
    if not wall or not ranks:
        return []
    waits = waiting_for_others(ranks)
    of_ranks: dict[str, dict[int, float]] = defaultdict(dict)
    for pid, rank in ranks.items():
        for name, time in rank_costs(rank, waits[pid]).items():
            of_ranks[name][pid] = time
        of_ranks[ENDING][pid] = wall - rank.end
    costs = []
    for name, times in of_ranks.items():
        total = sum(times.values())
        # The rank that the others wait for waits the least.
        worst = (min if name == WAITING else max)(ranks, key=lambda pid: times.get(pid, 0.0))
        costs.append(
            Cost(
                name,
                total / len(ranks) / wall,
                seconds=total / len(ranks) / 1e6,
                worst_rank=worst,
                worst_share=times.get(worst, 0.0) / wall,
            )
        )
    return sorted((cost for cost in costs if cost.share > 0), key=lambda cost: -cost.share)


def rank_costs(rank: Rank, waiting: float) -> dict[str, float]:
    """Microseconds by name; together the time from the run's start to this rank's last span."""
    stepping = rank.end - sum(rank.outside.values())
    costs = dict(rank.outside)
    if not rank.in_steps:
        return {**costs, OTHER: stepping}
    scale = stepping / rank.in_steps
    parts = dict(rank.step_parts)
    parts[OTHER] = parts.get(OTHER, 0.0) + rank.in_steps - sum(parts.values())
    if COMMUNICATION_LAP in parts:
        parts[WAITING] = parts[COMMUNICATION_LAP] * waiting
        parts[COMMUNICATION_LAP] -= parts[WAITING]
    for name, time in parts.items():
        costs[name] = costs.get(name, 0.0) + time * scale
    return costs


def waiting_for_others(ranks: Mapping[int, Rank]) -> dict[int, float]:
    """The share of each rank's communication that was a wait for the slowest rank.

    The last rank to arrive waits for no other, so the shortest time in a step is what the step's
    communication takes; a rank that takes longer has waited for the slowest.
    """
    shared = set.intersection(*(set(rank.steps) for rank in ranks.values()))
    total: dict[int, float] = dict.fromkeys(ranks, 0.0)
    waited: dict[int, float] = dict.fromkeys(ranks, 0.0)
    for key in shared:
        laps = {pid: rank.steps[key].get(COMMUNICATION_LAP, 0.0) for pid, rank in ranks.items()}
        shortest = min(laps.values())
        for pid, lap in laps.items():
            total[pid] += lap
            waited[pid] += lap - shortest
    return {pid: waited[pid] / total[pid] if total[pid] else 0.0 for pid in ranks}


ADVICE = {
    "feed wait": "The rows arrive too slowly. In the first epoch Spark computes them: "
    "persist() the DataFrame, or read fewer columns. Later epochs read the executor's local disk: "
    "put spark.local.dir on a fast disk, or use a larger batchSize.",
    "forward": "This is the work itself. More workers share it, cpusPerWorker gives each more "
    "threads, gpusPerWorker=1 a GPU; a larger batchSize often costs less per row.",
    "backward": "This is the work itself. More workers share it, cpusPerWorker gives each more "
    "threads, gpusPerWorker=1 a GPU; parameters that need no training can be frozen.",
    COMMUNICATION_LAP: "A larger batchSize or gradientAccumulation needs fewer exchanges per "
    "epoch; fewer workers, or workers on fewer hosts, make each one cheaper.",
    WAITING: "The others wait for this rank in every step. Look at its other costs: a slow feed, "
    "a busy host, or fewer cores than the others have.",
    "optimizer": "Its foreach or fused variant takes all parameters at once: "
    "partial(torch.optim.Adam, fused=True). A larger batchSize needs fewer steps.",
    "checkpoint copy": "Copy less often: Checkpoints(path, every='auto') weighs the cost against "
    "the failures seen. A copy that waits for the last one's write needs a faster store.",
    "validation": "Validate on fewer rows: a smaller fraction in validation=.",
    "merge buffers": "Buffers such as BatchNorm's are averaged after each epoch; longer epochs "
    "need that less often.",
    "callbacks": "on_step_end runs after every step on every rank: do less in it, or do it at the "
    "end of the epoch.",
    "end of epoch": "Ranks that run out of rows wait for the others here. Rows are spread by a "
    "hash of their content: many equal rows all go to one rank.",
    "open communicator": "The ranks find one another and connect, once per run, when the last of "
    "them has started: see the other ranks' start-up.",
    STARTUP: "Spark computes and shuffles the rows, and starts the workers' Python, before the "
    "first span. persist() the DataFrame; dml.session_builder() makes Python start with torch "
    "already imported.",
    RESTARTS: "Time from a failure to the next step. Look at the failure marks for its cause.",
    ENDING: "The model goes to the driver, and Spark ends the job. If it failed, this is "
    "how long it took to give up.",
    OTHER: "Between the recorded parts: the loop itself, and callbacks at the end of an epoch.",
}
UNKNOWN = "A span of your own: use ctx.spans.span(…) within it to see its parts."


def as_text(summary: Summary, title: str, largest: int = 5, notes: tuple[str, ...] = ()) -> str:
    ranks = len(summary.ranks)
    lines = [
        f"{title}: {ranks} rank{'s' * (ranks != 1)}, {summary.wall_seconds:,.1f} s, up to step "
        f"{summary.last_step:,} ({summary.num_steps:,} in the trace), {summary.outcome}",
        *notes,
    ]
    if summary.num_failures or summary.num_restarts:
        lines.append(f"failures: {summary.num_failures}, restarts: {summary.num_restarts}")
    if not summary.costs:
        return "\n".join([*lines, "", "No rank has recorded a span: the run ended before that."])
    for place, cost in enumerate(summary.costs[:largest], start=1):
        worst = ""
        if ranks > 1 and cost.name == WAITING:
            worst = f"; the slowest is {summary.ranks[cost.worst_rank]}"
        elif ranks > 1:
            worst = f"; most on {summary.ranks[cost.worst_rank]}: {cost.worst_share:.1%}"
        lines += [
            "",
            f"{place}. {cost.share:6.1%}  {cost.name} ({cost.seconds:,.2f} s per rank{worst})",
            *wrap(ADVICE.get(cost.name, UNKNOWN)),
        ]
    return "\n".join(lines)


def wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 96, initial_indent="   ", subsequent_indent="   ")
