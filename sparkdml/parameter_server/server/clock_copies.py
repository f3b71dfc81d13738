"""Copies of partitions as they are after a clock, for snapshot readers.

A copy after clock c has, of every worker, the pushes of its first c clocks and no others. So the
copies of all parts after the same clock are one model: no push is in one part and missing in
another. (A cut of the run that is consistent, in the words of Chandy and Lamport 1985.)

Where all pushes of a clock are applied as one step (BSP), a part is copied as it makes that step.
Elsewhere it is copied at once, if nothing of a later clock has been applied to it yet; what still
comes of the first c clocks is then applied to the copy too, until all workers have finished them.
A worker that leaves and comes again may go on at a lower clock; so copies end with the roster of
workers in which they were begun, and only those of one roster belong together. Of a worker that has
left, all pushes are in every copy, however far ahead it was: to wait until the others have come as
far could take the rest of the run.
Only a worker that dies amid a push leaves it in some parts alone, on the servers as in the copies.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from sparkdml.parameter_server.consistency import Clocks
from sparkdml.parameter_server.partition import Key
from sparkdml.parameter_server.stored_partition import Partition, Push
from sparkdml.parameter_server.wire.frames import Entry, Status

KEPT_SECONDS = 60.0  # for one who has asked and doesn't come again


@dataclass
class Copy:
    clock: int
    partition: Partition | None  # None before the step that it waits for
    asked_at: float


class ClockCopies:
    """Belongs to a node, and runs on its thread. One copy of a part for each reader."""

    def __init__(self, clocks: Clocks, aggregates: bool) -> None:
        self._clocks, self._aggregates = clocks, aggregates
        self._roster = 0
        self._copies: dict[Key, dict[int, Copy]] = {}

    def answer(
        self,
        answer: Entry,
        sender: int,
        partition: Partition,
        clock: int,
        sessions: Collection[int],
        wants_values: bool,
    ) -> None:
        """Say how far the copy is, begin it if there is none, and hand it over once it is done."""
        now, lowest = time.monotonic(), self._lowest(partition, sessions)
        answer.clock = lowest
        copy = self._copies.get(answer.key, {}).get(sender)
        if copy is None or copy.clock != clock:
            if clock < lowest:
                answer.status = Status.LATE
                return
            copy = self._begin(answer.key, sender, partition=partition, clock=clock, now=now)
        copy.asked_at = now
        is_at_rest = self._is_at_rest(partition, sessions)
        if copy.partition is None and is_at_rest:
            copy.partition = copy_of(partition)
        is_over = self._aggregates or is_at_rest or self._clocks.all_have_finished(clock)
        if copy.partition is None or not is_over:
            answer.status = Status.WAIT
        elif wants_values:
            answer.values, answer.generation = copy.partition.values.reshape(-1), self._roster
            del self._copies[answer.key][sender]

    def _lowest(self, partition: Partition, sessions: Collection[int]) -> int:
        """The first clock that the part can still be had after."""
        if self._aggregates:
            return partition.stepped
        last = [at for session, at in partition.pushed_at.items() if session in sessions]
        return max(self._clocks.slowest, 1 + max(last, default=-1))

    def _is_at_rest(self, partition: Partition, sessions: Collection[int]) -> bool:
        """Whether this roster has no workers, so that no push can come.

        Servers may then differ in what they take for the slowest clock.
        """
        return not sessions and (not self._aggregates or partition.stepped >= self._clocks.slowest)

    def _begin(self, key: Key, sender: int, partition: Partition, clock: int, now: float) -> Copy:
        of_part = self._copies.setdefault(key, {})
        for other in [o for o, copy in of_part.items() if now - copy.asked_at > KEPT_SECONDS]:
            del of_part[other]
        is_there = not self._aggregates or partition.stepped == clock
        of_part[sender] = Copy(clock, copy_of(partition) if is_there else None, now)
        return of_part[sender]

    def pushed(self, key: Key, push: Push) -> None:
        """Record that the part has taken a push."""
        if self._aggregates:
            return
        for copy in self._copies.get(key, {}).values():
            if push.clock < copy.clock:
                assert copy.partition is not None
                copy.partition.take(push, keep=False)

    def stepped(self, key: Key, partition: Partition) -> None:
        """Record that the part has made a clock's step."""
        for copy in self._copies.get(key, {}).values():
            if copy.clock == partition.stepped:
                copy.partition = copy_of(partition)

    def __len__(self) -> int:
        return sum(map(len, list(self._copies.values())))  # also from another thread

    def drop(self, key: Key) -> None:
        """Drop the copies of a part that was changed as a whole: readers get new ones."""
        self._copies.pop(key, None)

    def begin_roster(self, roster: int) -> None:
        """Drop all copies, as workers or servers have changed, and others may serve the parts."""
        self._roster = roster
        self._copies.clear()


def copy_of(partition: Partition) -> Partition:
    """Copy a part with its updater's state, so that later pushes can be applied to it."""
    slots = {name: slot.clone() for name, slot in partition.slots.items()}
    return Partition(
        partition.table,
        partition.part,
        updater=partition.updater,
        values=partition.values.clone(),
        slots=slots,
    )
