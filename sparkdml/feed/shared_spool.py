"""A spool that another process has written, read from here: by its own files, or over a wire.

A worker on the same host opens the owner's files through /proc and maps them: the page cache is
shared, nothing is copied. Whether it is the same host is proved by opening: what was opened must be
the very file (device, inode, length) that the owner speaks of. The files need no name on the disk,
so a kill -9 leaves nothing behind.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Arrays
from sparkdml.feed.spool import Spool

Card = dict[str, Any]  # what an owner tells the others of its spool; plain JSON


class Rows(Protocol):
    """Some worker's rows, wherever they are."""

    def take(self, rows: Ints) -> Arrays: ...
    def close(self) -> None: ...


class Shelf:
    """What a card says of an owner's rows: enough to order them without reading any."""

    def __init__(self, card: Card) -> None:
        spool = card["spool"]
        self._shards = np.array(spool["shards"], dtype=np.int64)
        self._counts = np.array(spool["counts"], dtype=np.int64)
        self.row_bytes = int(card["row_bytes"])

    def layout(self) -> tuple[Ints, Ints]:
        return self._shards, self._counts


def card_of(spool: Spool) -> Card:
    """For a sealed spool."""
    files = []
    for descriptor in spool.descriptors():
        stat = os.fstat(descriptor)
        files.append([descriptor, stat.st_dev, stat.st_ino, stat.st_size])
    return {
        "pid": os.getpid(),
        "files": files,
        "spool": spool.describe(),
        "row_bytes": spool.row_bytes,
    }


def open_here(card: Card) -> Spool | None:
    """The owner's spool through its own files, or None if they are not on this host."""
    opened: list[int] = []
    try:
        for descriptor, device, inode, size in card["files"]:
            path = Path("/proc") / str(int(card["pid"])) / "fd" / str(int(descriptor))
            own = os.open(path, os.O_RDONLY)
            opened.append(own)
            stat = os.fstat(own)
            if (stat.st_dev, stat.st_ino, stat.st_size) != (device, inode, size):
                raise FileNotFoundError(f"{path} is another file")
        return Spool.over(opened, card["spool"])
    except OSError:  # another host, another container, or a system without /proc
        for own in opened:
            os.close(own)
        return None
