"""Checkpoints in memory, with which runs on threads can be interrupted and resumed without a store.

States pass through the encoding of real checkpoints, so values that can't be written are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkdml.checkpoint.encoding import Stream, decode, take_apart
from sparkdml.checkpoint.fingerprint import describe
from sparkdml.checkpoint.manifest import Kind
from sparkdml.checkpoint.state import State, merge
from sparkdml.training.plan import Schedule


@dataclass
class Saved:
    """One checkpoint: the part of a manifest that a training reads, and its parts by rank."""

    step: int
    kind: Kind
    size: int
    global_batch: int
    plan: dict[str, str]
    parts: dict[int | None, bytes] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.size + 1


class MemoryCheckpoints:
    """The checkpoints of consecutive runs; pass the same object to all of them.

    Args:
        every: the number of steps between two checkpoints. Each epoch's end has one, too.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._saved: list[Saved] = []
        self._lock = threading.Lock()

    @property
    def newest(self) -> Saved | None:
        """Return the last checkpoint that every rank has saved."""
        return next((saved for saved in reversed(self._saved) if saved.is_complete), None)

    def put(self, saved: Saved, rank: int | None, state: State) -> None:
        saved.parts[rank] = b"".join(Stream(*take_apart(state)))
        self.take_in(saved)

    def take_in(self, saved: Saved) -> None:
        """Add parts of a checkpoint, which may already have others."""
        with self._lock:
            for known in self._saved:
                if (known.step, known.kind, known.size) == (saved.step, saved.kind, saved.size):
                    known.parts.update(saved.parts)
                    return
            self._saved.append(saved)

    def all(self) -> list[Saved]:
        """Return all checkpoints in order, including those that only some ranks have saved."""
        return list(self._saved)


class RankCheckpoints:
    """One rank's `ctx.checkpoint`, on the checkpoints that all ranks share."""

    writes, busy = True, False

    def __init__(
        self,
        shared: MemoryCheckpoints,
        resumed: Saved | None,
        rank: int,
        size: int,
        schedule: Schedule,
    ) -> None:
        self.resumed = resumed
        self._shared, self._rank, self._size = shared, rank, size
        self._plan = {
            "batchSize": describe(schedule.batch_size),
            "gradientAccumulation": describe(schedule.accumulate),
        }

    def due(self, step: int) -> bool:
        return step % self._shared.every == 0

    def due_after_epoch(self, epoch: int) -> bool:
        return True

    def save(
        self,
        step: int,
        state: State,
        *,
        epoch: int,
        kind: Kind,
        metrics: dict[str, float],
        global_batch: int,
        later: Callable[[], State],
    ) -> None:
        def put(rank: int | None, part: State) -> None:
            saved = Saved(step, kind, size=self._size, global_batch=global_batch, plan=self._plan)
            self._shared.put(saved, rank, part)

        own = {name: entry for name, entry in state.items() if entry.rule != "replicated"}
        put(self._rank, {**own, **later()})
        if self._rank == 0:
            put(None, {name: e for name, e in state.items() if e.rule == "replicated"})

    def load_entries(self) -> State | None:
        if self.resumed is None:
            return None
        parts = {rank: decode(part, "a part") for rank, part in self.resumed.parts.items()}
        shared = parts.pop(None)
        if self.resumed.size == self._size:
            return {**shared, **parts[self._rank]}
        return {**shared, **merge([parts[rank] for rank in sorted(parts, key=lambda r: r or 0)])}

    def wait(self) -> None:
        """Do nothing: writes are synchronous."""
