"""How far an epoch is on this rank: what its row of the history and a checkpoint are made of.

Belongs to the loop of one worker, and is read and written on its thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparkdml.feed.order import Ints
from sparkdml.training.totals import Totals


class EpochProgress:
    """Counted from where the epoch begins on this rank.

    Args:
        number: counted from 0.
        start: where in this rank's rows it begins, if not at their start.
        rows_before: how many of them this rank had trained on before that, in a run that was
            resumed. Where the number of ranks has changed it is the mean of what they had, which
            may be a fraction of a row.
    """

    def __init__(self, number: int, start: Ints | None = None, rows_before: float = 0.0) -> None:
        self.number = number
        self.start = start
        self.rows_before = rows_before
        self.totals = Totals()
        self.steps = 0
        self.measured: dict[str, float] = {}  # what the strategy adds to the row, on every rank
        self.rows_here = 0  # that this rank has trained on since the epoch began here
        # Of this rank's shards: how many rows any rank has used since it began here, where other
        # ranks may train on them.
        self.used_rows: int | None = None
        self._seconds_before = 0.0
        self._started = time.perf_counter()

    def state(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "totals": asdict(self.totals),
            "steps": self.steps,
            "seconds": self.seconds,
            "measured": self.measured,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state of the same epoch."""
        assert state["number"] == self.number
        self.totals = Totals.load(state["totals"])
        self.steps = state["steps"]
        self._seconds_before = state["seconds"]
        self.measured = dict(state.get("measured", {}))  # which older checkpoints have not

    @property
    def own_rows(self) -> float:
        """Of this rank, for its weight among the others."""
        return self.rows_before + self.rows_here

    @property
    def rows_read(self) -> int:
        """How many rows of this rank's shards have been used since the epoch began here."""
        return self.rows_here if self.used_rows is None else self.used_rows

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started
