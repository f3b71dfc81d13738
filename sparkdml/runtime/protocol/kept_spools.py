"""Spools that a failed submission left on workers' disks, as the plan of the next one names them.

The driver writes them into the plan; each task finds its rank by them, reads its spool, and removes
what is stale. A spool has a name and no path: whatever the driver was told, only folders of this
user's in Spark's local directories are read and removed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkdml.errors import ProtocolError
from sparkdml.feed.feed import KEPT_PREFIX


@dataclass(frozen=True)
class KeptSpool:
    """One rank's rows on one host's disk."""

    host: str
    name: str


def checked_name(name: object) -> str:
    """The name, if it is one that `Feed` gives to a kept spool."""
    if not isinstance(name, str) or not re.fullmatch(rf"{KEPT_PREFIX}[a-z0-9_]+", name):
        raise ProtocolError(f"a kept spool is named {KEPT_PREFIX}…, without a path, not {name!r}")
    return name


def find_spool(name: str) -> Path:
    """The spool's folder on this host."""
    found = next(_find(name), None)
    if found is None:
        raise FileNotFoundError(f"{name} is in no local directory of this executor")
    return found


def remove_spools(names: Sequence[str]) -> None:
    for name in names:
        for folder in _find(name):
            shutil.rmtree(folder, ignore_errors=True)  # removed already, by another task


def _find(name: str) -> Iterator[Path]:
    for directory in _local_directories():
        folder = directory / checked_name(name)
        if _is_own_folder(folder):
            yield folder


def _local_directories() -> list[Path]:
    """Those of this executor, and of others of this host: a rank may move between them."""
    own = [Path(path) for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if path]
    parents = dict.fromkeys(path.parent for path in own)
    # Executors of one application have such folders side by side on YARN and Kubernetes, and each
    # below its Worker's and its own on a standalone cluster.
    others = [path for parent in parents for path in _own_folders(parent, ["blockmgr-*"])]
    for parent in parents:
        if parent.match("spark-*/executor-*"):
            root = parent.parent.parent
            others += _own_folders(root, ["spark-*", "executor-*", "blockmgr-*"])
    return [*dict.fromkeys([*own, *others, Path(tempfile.gettempdir())])]


def _own_folders(parent: Path, patterns: Sequence[str]) -> list[Path]:
    """The folders below `parent` whose path fits the patterns, no step of it by a link."""
    found = [parent]
    for pattern in patterns:
        found = [path for above in found for path in sorted(above.glob(pattern))]
        found = [path for path in found if _is_own_folder(path)]
    return found


def _is_own_folder(path: Path) -> bool:
    """Whether it is a folder of this user's; a link is none."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


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
