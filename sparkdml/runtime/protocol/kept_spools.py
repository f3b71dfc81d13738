"""Spools that a failed submission left on workers' disks, as the plan of the next one names them.

Pure values and functions: the driver writes them into the plan, and each task finds its rank and
removes what is stale by them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KeptSpool:
    """One rank's rows on one host's disk."""

    host: str
    folder: str


def remove_spools(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # on another host, or removed already


def assign_ranks(partition_hosts: Sequence[str], spool_hosts: Mapping[int, str]) -> list[int]:
    """The rank of each partition's task, on the host of its spool wherever possible.

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
    # A rank that can't be on its spool's host takes any task, and reports that the spool is gone.
    for same_host in (True, False):
        for rank in list(waiting):
            for partition in range(count):
                fits = partition_hosts[partition] == spool_hosts[rank] or not same_host
                if ranks[partition] is None and fits:
                    ranks[partition] = rank
                    waiting.remove(rank)
                    break
    return [rank for rank in ranks if rank is not None]
