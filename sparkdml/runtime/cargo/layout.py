"""Several buffers one after another in a file, and mapped from it again."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

ALIGNMENT = 64  # of each buffer, for the vector units that will read it
PIECE_BYTES = 4 << 20


def pieces(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """The file's content, without a copy of anything."""
    for buffer in buffers:
        for start in range(0, buffer.nbytes, PIECE_BYTES):
            yield buffer[start : start + PIECE_BYTES]
        yield memoryview(bytes(_padding(buffer.nbytes)))


def total(sizes: Sequence[int]) -> int:
    return sum(size + _padding(size) for size in sizes)


def map_buffers(path: Path, sizes: Sequence[int]) -> list[memoryview]:
    """Pages are read when they are used; writing to them changes neither file nor other readers.

    The file may be removed at once: the mapping outlives its name.
    """
    found = path.stat().st_size
    if found != total(sizes):
        raise OSError(f"{path} has {found:,} bytes, not {total(sizes):,}")
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    buffers, start = [], 0
    for size in sizes:
        buffers.append(whole[start : start + size])
        start += size + _padding(size)
    return buffers


def _padding(size: int) -> int:
    return -size % ALIGNMENT
