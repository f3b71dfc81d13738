"""Spools that outlive a failure: which ranks' rows are still on workers' disks, and where.

Runs at the driver, for all submissions of a run; the control server's threads report spools while
the caller's thread reads them between submissions. A spool lies in a local directory of an
executor, which Spark removes when the executor ends in good order. When a run is started again with
as many workers as before, only the rows of ranks without a spool are computed again by Spark.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkdml.runtime.protocol.kept_spools import KeptSpool, checked_name, remove_spools

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from sparkdml.network.connection import Message


@dataclass
class Spools:
    """What the driver knows of the run's spools."""

    num_workers: int = 0
    kept: dict[int, KeptSpool] = field(default_factory=dict)
    facts: dict[str, Any] | None = None  # of the rows in them
    num_losses: int = 0  # how often one turned out to be gone
    _all: set[str] = field(default_factory=set)
    _left: set[str] = field(default_factory=set)
    _made: dict[tuple[int, int | None], set[str]] = field(default_factory=dict)

    def note(self, rank: int, message: Message, num_workers: int, pid: int | None = None) -> None:
        """A rank reports where its spool is, and whether all of its rows are in it."""
        name = checked_name(message["name"])
        self._all.add(name)
        self._made.setdefault((rank, pid), set()).add(name)
        if num_workers != self.num_workers:
            self.num_workers, self.kept = num_workers, {}
        if message["whole"]:
            self.kept[rank] = KeptSpool(message["host"], name)

    def lost(self, rank: int) -> None:
        self.num_losses += 1
        self.kept.pop(rank, None)

    def usable(self, num_workers: int) -> dict[int, KeptSpool]:
        """Those that a submission of `num_workers` can start from, if they still exist."""
        return dict(self.kept) if num_workers == self.num_workers else {}

    def stale(self) -> tuple[str, ...]:
        """Those that failed submissions left and that will not be read: they only take room."""
        return tuple(sorted(self._left - {spool.name for spool in self.kept.values()}))

    def orphaned(self, rank: int, pid: int) -> None:
        """A process is gone that Spark starts again: its spool serves no other."""
        self._left |= self._made.pop((rank, pid), set())

    def left_behind(self) -> None:
        """A submission has failed: its workers leave their spools to those of the next one."""
        self._left |= self._all

    def remove_left(self, spark: SparkSession, here: bool) -> None:
        """The run is over. A worker that ended without a failure has removed its own spool.

        Tasks do it, which know their executor's directories. With `here` one task reaches all.
        """
        names = sorted(self._left)
        if not names:
            return
        # Several tasks for each, since a task can't be sent to a given host. By mapInArrow, which
        # uses the Python processes that the run has left; an RDD would start others.
        count = 1 if here else 4 * len(names)
        try:
            tasks = spark.range(0, count, 1, numPartitions=count)
            tasks.mapInArrow(partial(_remove, names), "id long").collect()
        except Exception as error:
            warnings.warn(
                f"spools stay on the executors' disks until the executors end: {error}",
                stacklevel=2,
            )


def _remove(names: Sequence[str], rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    remove_spools(names)
    for _ in rows:
        pass
    yield from ()
