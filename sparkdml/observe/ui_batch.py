"""Gathers events between two posts to Spark, and merges what can be: the event log stays small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sparkdml.observe.observers import Event

MOST_LOSSES = 100  # a post
MOST_LOSSES_WAITING = 1_000
MOST_LOGS = 200
MOST_EVENTS = 2_000
RANKS_A_POST = 32

_LEFT_OUT = ("output", "spans")  # of no use in the tab, and large


def thin(points: Sequence[Sequence[Any]], most: int) -> list[Sequence[Any]]:
    """At most `most` of the points: of each stretch the one with the least value and the greatest.

    A value that isn't a finite number counts as the greatest: it must not get lost.
    """
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most // 2))
    kept: list[Sequence[Any]] = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        ends = {
            min(part, key=lambda i: _height(points[i])),
            max(part, key=lambda i: _height(points[i])),
        }
        kept += [points[i] for i in sorted(ends)]
    return kept


def _height(point: Sequence[Any]) -> float:
    value = point[1]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.inf


class EventBatch:
    """What has happened since the last post, of bounded size. Not safe for several threads."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ranks: dict[int, Event] = {}
        self._steps: Event | None = None  # the last of _events, where later steps may join it
        self._logs = 0
        self._takes_without_ranks = 0

    def add(self, rank: int, event: Event) -> None:
        kind = event.get("kind")
        if kind in _LEFT_OUT:
            return
        if kind == "rank":
            self._add_rank(rank, event)
        elif kind == "steps":
            self._add_steps(rank, event)
        elif kind == "log":
            self._logs += 1
            if self._logs <= MOST_LOGS:
                self._append({**event, "rank": rank})
        else:
            self._steps = None  # losses must not move across a restart or the end of an epoch
            self._append({**event, "rank": rank})

    def _append(self, event: Event) -> None:
        if len(self._events) < MOST_EVENTS or event["kind"] == "run-end":
            self._events.append(event)

    def _add_rank(self, rank: int, event: Event) -> None:
        before = self._ranks.get(rank)
        merged = {**event, "rank": rank}
        if before is not None:
            merged["steps"] = before.get("steps", 0) + event.get("steps", 0)
            merged["rows"] = before.get("rows", 0) + event.get("rows", 0)
            seconds, more = before.get("seconds", {}), event.get("seconds", {})
            merged["seconds"] = {
                part: seconds.get(part, 0.0) + more.get(part, 0.0) for part in {**seconds, **more}
            }
        self._ranks[rank] = merged

    def _add_steps(self, rank: int, event: Event) -> None:
        losses = list(event.get("losses", ()))
        before = self._steps
        if before is None or before.get("epoch") != event.get("epoch"):
            self._steps = {**event, "rank": rank, "losses": losses}
            self._append(self._steps)
            return
        gathered = before["losses"] + losses
        if len(gathered) > MOST_LOSSES_WAITING:  # the JVM is slow to take them
            gathered = thin(gathered, MOST_LOSSES_WAITING // 2)
        before.update({**event, "rank": rank, "losses": gathered})

    def take(self, final: bool = False) -> list[Event]:
        """The events to post now. With many ranks their sums come with every few posts only."""
        events, self._events = self._events, []
        self._steps, self._logs = None, 0
        for event in events:
            if event["kind"] == "steps":
                event["losses"] = thin(event["losses"], MOST_LOSSES)
        self._takes_without_ranks += 1
        if final or self._takes_without_ranks * RANKS_A_POST >= len(self._ranks):
            # After run-start, and before run-end, which is the last thing told of a run.
            ends = [event for event in events if event["kind"] == "run-end"]
            others = [event for event in events if event["kind"] != "run-end"]
            events = [*others, *self._ranks.values(), *ends]
            self._ranks = {}
            self._takes_without_ranks = 0
        return events
