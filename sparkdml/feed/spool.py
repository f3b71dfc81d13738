"""The spool: a worker's rows on its local disk, one file a column, memory-mapped once written.

A column file is the tensor itself, row after row, so that a batch of any rows is one gather out of
the page cache. The files are unlinked as soon as they are open: the space is given back when the
process ends, however it ends, and nobody else can read them. Where a run may be started again after
a failure, they lie in a folder instead, which the worker that takes this one's place can open.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparkdml.errors import DataError, SetupError
from sparkdml.feed.order import Ints
from sparkdml.feed.recycling import Recycler


class ColumnFile:
    """One column on disk: append first, then read through a memory map."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self._file = file
        self.row_shape: tuple[int, ...] | None = None
        self.dtype: np.dtype[np.generic] | None = None
        self.num_rows = 0
        self._map: mmap.mmap | None = None

    @classmethod
    def unlinked(cls, name: str, directory: str) -> ColumnFile:
        descriptor, path = tempfile.mkstemp(prefix="sparkdml-spool-", dir=directory)  # mode 0600
        os.unlink(path)
        return cls(name, os.fdopen(descriptor, "r+b", buffering=0))

    @classmethod
    def kept(cls, name: str, path: Path) -> ColumnFile:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        return cls(name, os.fdopen(descriptor, "r+b", buffering=0))

    def append(self, values: np.ndarray) -> None:
        if self.row_shape is None:
            self.row_shape, self.dtype = values.shape[1:], values.dtype
        elif values.shape[1:] != self.row_shape:
            raise DataError(
                f"column {self.name!r} has rows of shape {list(values.shape[1:])} and of shape "
                f"{list(self.row_shape)}. Every row needs the same: pad or cut before training"
            )
        self.num_rows += len(values)
        view = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        while len(view):
            try:
                view = view[self._file.write(view) :]
            except OSError as error:
                raise SetupError(
                    f"the spool can't be written: {error}. Free space in the executor's local "
                    "directories, or point spark.local.dir at a larger disk"
                ) from error

    def rows(self) -> np.ndarray:
        """The whole column as a read-only array backed by the file."""
        dtype = np.dtype(np.float32) if self.dtype is None else self.dtype
        shape = (self.num_rows, *(self.row_shape or ()))
        if not int(np.prod(shape)):
            return np.empty(shape, dtype)
        if self._map is None:
            try:
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise SetupError(
                    f"the spool of {self.num_rows:,} rows can't be memory-mapped: {error}. "
                    "spark.executor.pyspark.memory limits a worker's address space: raise it or "
                    "unset it (the map itself uses no memory of the worker's)"
                ) from error
        return np.frombuffer(self._map, dtype=dtype).reshape(shape)

    def close(self) -> None:
        self._map = None  # unmapped when the last array that views it is gone
        self._file.close()


class Spool:
    """All columns of the rows that one worker owns, with the shard that each row belongs to."""

    def __init__(self, directory: str, folder: Path | None = None) -> None:
        self._directory = directory
        self._folder = folder  # where the files are kept; None: nobody else will want them
        self._files: dict[str, ColumnFile] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._recyclers: dict[str, Recycler] = {}
        self._shards: list[int] = []
        self._counts: list[int] = []
        self.num_rows = 0

    def append(self, columns: Mapping[str, np.ndarray], shards: Ints) -> None:
        """Add rows. Those of one shard come one after the other, over all calls."""
        if not len(shards):
            return
        if not self._files:
            self._files = {name: self._make_file(i, name) for i, name in enumerate(columns)}
        for name, file in self._files.items():
            file.append(columns[name])
        self.num_rows += len(shards)
        cuts = np.flatnonzero(np.diff(shards)) + 1
        starts = np.concatenate(([0], cuts))
        lengths = np.diff(np.concatenate((starts, [len(shards)])))
        for shard, length in zip(shards[starts].tolist(), lengths.tolist(), strict=True):
            if self._shards and self._shards[-1] == shard:
                self._counts[-1] += length
            else:
                self._shards.append(shard)
                self._counts.append(length)

    def layout(self) -> tuple[Ints, Ints]:
        """The shards in the order in which they lie here, and how many rows each has so far."""
        counts = np.array(self._counts, dtype=np.int64)
        # Another thread may be appending: it names a shard before it counts its rows.
        return np.array(self._shards[: len(counts)], dtype=np.int64), counts

    @property
    def row_bytes(self) -> int:
        return sum(
            int(np.prod(file.row_shape or (), dtype=np.int64)) * file.dtype.itemsize
            for file in self._files.values()
            if file.dtype is not None
        )

    def _make_file(self, index: int, name: str) -> ColumnFile:
        if self._folder is None:
            return ColumnFile.unlinked(name, self._directory)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return ColumnFile.kept(name, self._folder / f"column-{index}")

    def describe(self) -> dict[str, Any]:
        """What must be known to open the files again."""
        return {
            "shards": self._shards,
            "counts": self._counts,
            "columns": [
                {
                    "name": file.name,
                    "dtype": None if file.dtype is None else file.dtype.str,
                    "shape": list(file.row_shape or ()),
                }
                for file in self._files.values()
            ],
        }

    @classmethod
    def reopen(cls, folder: Path, description: dict[str, Any]) -> Spool:
        """The spool that another process has sealed and left."""
        spool = cls(str(folder), folder)
        spool._shards, spool._counts = description["shards"], description["counts"]
        spool.num_rows = sum(spool._counts)
        for index, column in enumerate(description["columns"]):
            file = ColumnFile.kept(column["name"], folder / f"column-{index}")
            file.dtype = np.dtype(column["dtype"])
            file.row_shape, file.num_rows = tuple(column["shape"]), spool.num_rows
            spool._files[file.name] = file
        spool.seal()
        return spool

    def seal(self) -> None:
        """No more rows: map the files."""
        self._arrays = {name: file.rows() for name, file in self._files.items()}
        self._recyclers = {name: Recycler() for name in self._files}

    def take(self, rows: Ints) -> dict[str, np.ndarray]:
        """The given rows, in the given order. The memory is used again once nobody holds it."""
        taken = {}
        for name, array in self._arrays.items():
            out = self._recyclers[name].array((len(rows), *array.shape[1:]), array.dtype)
            # mode="clip" lets numpy skip a check that costs half of the time; the row numbers are
            # our own.
            taken[name] = np.take(array, rows, axis=0, out=out, mode="clip")
        return taken

    def slice(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows as they were written. Copied, since a map can't be handed out as writable."""
        return {name: array[start:stop].copy() for name, array in self._arrays.items()}

    def close(self) -> None:
        self._arrays = {}
        for file in self._files.values():
            file.close()
