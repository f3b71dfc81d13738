"""Spools that outlive a failure: who has which rank's rows on disk, so that Spark need not compute
them again.

A spool lies in a local directory of an executor, which Spark removes when the executor ends in good
order. When a run is started again with as many workers as before, each rank is given to a task on
the host where its spool is. Only the rows of ranks without one come from Spark once more.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from sparkdml.network.connection import Message


@dataclass(frozen=True)
class KeptSpool:
    """One rank's rows on one host's disk."""

    host: str
    folder: str


@dataclass
class Spools:
    """What the driver knows of them."""

    num_workers: int = 0
    kept: dict[int, KeptSpool] = field(default_factory=dict)
    facts: dict[str, Any] | None = None  # of the rows in them
    num_losses: int = 0  # how often one turned out to be gone
    _all: set[str] = field(default_factory=set)
    _left: set[str] = field(default_factory=set)

    def note(self, rank: int, message: Message, num_workers: int) -> None:
        """A rank has told where its spool is, and whether all of its rows are there."""
        self._all.add(message["folder"])
        if num_workers != self.num_workers:
            self.num_workers, self.kept = num_workers, {}
        if message["whole"]:
            self.kept[rank] = KeptSpool(message["host"], message["folder"])

    def lost(self, rank: int) -> None:
        self.num_losses += 1
        self.kept.pop(rank, None)

    def usable(self, num_workers: int) -> dict[int, KeptSpool]:
        """Those that a submission of so many workers can start from, if they are still there."""
        return dict(self.kept) if num_workers == self.num_workers else {}

    def stale(self) -> tuple[str, ...]:
        """Those that failed submissions left and that nobody will read: room on somebody's disk."""
        return tuple(sorted(self._left - {spool.folder for spool in self.kept.values()}))

    def left_behind(self) -> None:
        """A submission has failed: its workers leave their spools for those that follow."""
        self._left |= self._all

    def remove_left(self, spark: SparkSession, here: bool) -> None:
        """The run is over, and nobody will follow. A worker that ended well removed its own.

        With `here` the disks are this process's own; else tasks have to be sent to them.
        """
        folders = sorted(self._left)
        if here or not folders:
            remove_spools(folders)
            return
        # Several tasks for each, since none can be sent to a host of choice. By mapInArrow, whose
        # Python processes the run has left warm: an RDD's would be others, to be started first.
        count = 4 * len(folders)
        tasks = spark.range(0, count, 1, numPartitions=count)
        try:
            tasks.mapInArrow(partial(_remove, folders), "id long").collect()
        except Exception as error:
            warnings.warn(f"spools are left until the executors end: {error}", stacklevel=2)


def remove_spools(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # on another host, or removed already


def _remove(folders: Sequence[str], rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    remove_spools(folders)
    for _ in rows:
        pass
    yield from ()


def assign_ranks(partition_hosts: Sequence[str], spool_hosts: Mapping[int, str]) -> list[int]:
    """The rank of each partition's task: where its spool is, if that can be.

    A rank without a spool gets its rows from Spark, in the partition of the same number.
    """
    count = len(partition_hosts)
    ranks: list[int | None] = [None] * count
    waiting: list[int] = []
    for rank in range(count):
        if rank not in spool_hosts or partition_hosts[rank] == spool_hosts[rank]:
            ranks[rank] = rank
        else:
            waiting.append(rank)
    # Who can't be served sits where there is room, and will say that the spool is gone.
    for same_host in (True, False):
        for rank in list(waiting):
            for partition in range(count):
                fits = partition_hosts[partition] == spool_hosts[rank] or not same_host
                if ranks[partition] is None and fits:
                    ranks[partition] = rank
                    waiting.remove(rank)
                    break
    return [rank for rank in ranks if rank is not None]
