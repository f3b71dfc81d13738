"""One server's copy of a partition of a table: values, what the updater remembers, who pushed what.

Every change counts up `version`; two copies with the same version, changed last in the same
generation, are alike. A push carries its number among its worker's pushes to this part, and is
taken only in order, so that it is never applied twice and none is left out, whichever server is the
primary. These numbers restart with a client. A push may bear a mark, too, which must not: of one
worker's marks only growing ones are taken, so what it pushes once more after a restart does nothing
where it had come through before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparkdml.parameter_server.optimizers import Slots, Updater, updater_from
from sparkdml.parameter_server.partition import Table
from sparkdml.parameter_server.wire.frames import Entry, Status


@dataclass
class Push:
    """A worker's update of a part; `rows` are int64, counted from the part's first row."""

    session: int
    worker: int
    number: int
    clock: int
    weight: float
    rows: Tensor | None
    values: Tensor | None  # of shape (rows, width); None where there is nothing but a weight
    mark: int = 0

    def order(self) -> tuple[int, int, int]:
        return self.worker, self.session, self.number


@dataclass
class Partition:
    table: Table
    part: int
    updater: Updater
    values: Tensor  # (rows, width)
    slots: Slots
    applied: dict[int, int] = field(default_factory=dict)  # client's number -> its last push
    marks: dict[int, int] = field(default_factory=dict)  # worker -> the last mark of its pushes
    kept: dict[int, list[Push]] = field(default_factory=dict)  # clock -> pushes, for a step
    last: dict[int, list[Push]] = field(default_factory=dict)  # worker -> to stand in for it
    stepped: int = 0  # clocks whose steps are done
    version: int = 0
    generation: int = 0
    pushed_at: dict[int, int] = field(default_factory=dict)  # client's number -> that push's clock

    @classmethod
    def new(cls, table: Table, part: int, updater: Updater, values: Tensor) -> Partition:
        start, stop = table.range(part)
        own = values.to(table.dtype, copy=True).reshape(stop - start, table.width)
        return cls(table, part, updater, own, updater.slots(own, table.by_row))

    def check(self, entry: Entry, finite_only: bool) -> Status:
        """Whether a push can be taken now."""
        last = self.applied.get(entry.session, 0)
        if entry.number > last + 1:
            return Status.GAP
        num_values = 0 if entry.values is None else entry.values.numel()
        num_rows = len(self.values)
        if entry.rows is not None:
            num_rows = len(entry.rows)
            if num_rows and not _ascending(entry.rows, len(self.values)):
                return Status.REFUSED
        if num_values != num_rows * self.table.width or not 0 <= entry.weight < float("inf"):
            return Status.REFUSED
        if finite_only and entry.values is not None and not _finite(entry.values):
            return Status.NOT_FINITE
        return Status.OK

    def has_had(self, entry: Entry) -> bool:
        """Whether an earlier life of the worker has pushed this already."""
        return 0 < entry.mark <= self.marks.get(entry.worker, 0)

    def push_from(self, entry: Entry) -> Push:
        values = entry.values
        if values is not None:
            values = values.to(self.values.dtype).reshape(-1, self.table.width)
        rows = None if entry.rows is None else entry.rows.to(torch.int64)
        return Push(
            entry.session,
            entry.worker,
            number=entry.number,
            clock=entry.clock,
            weight=entry.weight,
            rows=rows,
            values=values,
            mark=entry.mark,
        )

    def take(self, push: Push, keep: bool, stand_in: bool = False) -> None:
        """Apply a push, or keep it for its clock's step. One that is late joins the next step."""
        self.pushed_at[push.session] = push.clock
        self.applied[push.session] = push.number
        if push.mark:
            self.marks[push.worker] = push.mark
        self.version += 1
        if keep:
            clock = max(push.clock, self.stepped)
            self.kept.setdefault(clock, []).append(push)
            if stand_in:
                self.last[push.worker] = [p for p in self.kept[clock] if p.worker == push.worker]
        else:
            self._apply([push])

    def forget(self, session: int) -> None:
        """A client has left: all its pushes were acknowledged."""
        self.applied.pop(session, None)
        self.pushed_at.pop(session, None)

    def skip(self, session: int, number: int) -> None:
        """Count a push that was refused, so that the next one is in order."""
        self.applied[session] = number
        self.version += 1

    def step(self, absent: Sequence[int] = ()) -> None:
        """Apply all pushes of the next clock as one, in the order of the workers.

        For the `absent` ones who sent nothing their last gradient stands in, if there is one. What
        is added up counts something, and must not be counted again.
        """
        pushes = self.kept.pop(self.stepped, [])
        self.stepped += 1
        self.version += 1
        if self.updater.additive:
            absent = ()
        present = {push.worker for push in pushes}
        pushes += [
            push for worker in absent if worker not in present for push in self.last.get(worker, [])
        ]
        self._apply(sorted(pushes, key=Push.order))

    def _apply(self, pushes: list[Push]) -> None:
        weight = sum(push.weight for push in pushes)
        pushes = [push for push in pushes if push.values is not None]
        if not pushes or (weight == 0 and not self.updater.additive):
            return  # no worker had an example
        rows, total = _sum(pushes, self.values)
        if not self.updater.additive and weight != 1.0:
            total = total / weight
        if rows is None:
            self.updater.update(self.values, total, self.slots)
        else:
            self.updater.update_rows(self.values, rows, total, self.slots)

    def set_updater(self, updater: Updater) -> None:
        """Keep what the old one remembered where the new one remembers the same."""
        fresh = updater.slots(self.values, self.table.by_row)
        for name, slot in fresh.items():
            old = self.slots.get(name)
            if old is not None and old.shape == slot.shape:
                fresh[name] = old
        self.updater, self.slots = updater, fresh
        self.version += 1

    # A copy as a message, for another server or for a checkpoint ---------------------------------

    def to_parts(self) -> tuple[dict[str, Any], list[Entry]]:
        """A text, and entries with the tensors; these are copies, so the partition may go on."""
        entries = [self._entry(self.values.clone())]
        entries += [self._entry(slot.clone()) for slot in self.slots.values()]
        for pushes in self.kept.values():
            for push in pushes:
                entry = self._entry(push.values)
                entry.session, entry.worker, entry.number = push.session, push.worker, push.number
                entry.clock, entry.weight = push.clock, push.weight
                entry.rows = None if push.rows is None else push.rows.to(torch.int32)
                entries.append(entry)
        text = {
            "table": self.table.to_dict(),
            "pushed_at": [[str(session), clock] for session, clock in self.pushed_at.items()],
            "updater": self.updater.to_dict(),
            "slots": [[name, list(slot.shape)] for name, slot in self.slots.items()],
            "kept": [[clock, len(pushes)] for clock, pushes in self.kept.items()],
            "applied": [[str(session), number] for session, number in self.applied.items()],
            "marks": list(self.marks.items()),
            "stepped": self.stepped,
        }
        return text, entries

    def _entry(self, values: Tensor | None) -> Entry:
        flat = None if values is None else values.reshape(-1)
        entry = Entry(self.table.number, self.part, values=flat)
        entry.version, entry.generation = self.version, self.generation
        return entry

    @classmethod
    def from_parts(cls, text: dict[str, Any], entries: list[Entry]) -> Partition:
        """The inverse of `to_parts`. Raises ValueError, KeyError or TypeError for anything else."""
        table = Table.from_dict(text["table"])
        first = entries[0]
        if first.values is None or not 0 <= first.part < table.num_parts:
            raise ValueError("a copy without values")
        partition = cls.new(table, first.part, updater_from(text["updater"]), first.values)
        remaining = iter(entries[1:])
        slots: Slots = {}
        for name, shape in text["slots"]:
            values = next(remaining).values
            if values is None:
                raise ValueError("a slot without values")
            slots[str(name)] = values.clone().reshape([int(size) for size in shape])
        partition.slots = slots
        partition.pushed_at = {int(session): int(clock) for session, clock in text["pushed_at"]}
        for clock, count in text["kept"]:
            for _ in range(int(count)):
                partition.kept.setdefault(int(clock), []).append(
                    partition.push_from(next(remaining))
                )
        partition.applied = {int(session): int(number) for session, number in text["applied"]}
        partition.marks = {int(worker): int(mark) for worker, mark in text["marks"]}
        partition.stepped = int(text["stepped"])
        partition.version, partition.generation = first.version, first.generation
        return partition


def _sum(pushes: list[Push], like: Tensor) -> tuple[Tensor | None, Tensor]:
    """All updates added up in the given order, and the rows that they touch (None: all)."""
    if len(pushes) == 1:
        only = pushes[0]
        assert only.values is not None
        return only.rows, only.values
    named = [push.rows for push in pushes if push.rows is not None]
    if len(named) < len(pushes):
        total = torch.zeros_like(like)
        for push in pushes:
            assert push.values is not None
            if push.rows is None:
                total += push.values
            else:
                total.index_add_(0, push.rows, push.values)
        return None, total
    rows, where = torch.unique(torch.cat(named), return_inverse=True)
    total = torch.zeros((len(rows), like.shape[1]), dtype=like.dtype)
    for push, positions in zip(pushes, where.split([len(r) for r in named]), strict=True):
        assert push.values is not None
        total.index_add_(0, positions, push.values)
    return rows, total


def _ascending(rows: Tensor, num_rows: int) -> bool:
    inside = bool(rows[0] >= 0) and bool(rows[-1] < num_rows)
    return inside and (len(rows) == 1 or bool((rows[1:] > rows[:-1]).all()))


def _finite(values: Tensor) -> bool:
    # A sum is NaN or infinite if any addend is; it may also overflow by itself, so look closer.
    return not values.is_floating_point() or bool(
        torch.isfinite(values.sum()) or torch.isfinite(values).all()
    )
