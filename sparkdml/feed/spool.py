"""The spool: a worker's rows on its local disk, one file a column, memory-mapped once written.

A column file is the tensor itself, row after row, so that a batch of any rows is one gather out of
the page cache; a column of rows of any length has a second file, of where each row ends. The files
are unlinked as soon as they are open: the space is given back when the process ends, however it
ends, and no other user can read them. Where a run may be restarted after a failure, they lie in a
folder instead, which the worker that replaces this one can open.

Owned by the worker's process. One thread appends, then seals; batches are gathered by the thread
that makes them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparkdml.errors import DataError, SetupError
from sparkdml.feed.batch import Recycler
from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Arrays
from sparkdml.feed.ragged import RaggedArray, element_numbers

DRAWS = "__sparkdml_draws"  # a column of the spool that no batch has: how often a row is drawn


class Spool:
    """All columns of the rows that one worker owns, with the shard that each row belongs to."""

    def __init__(self, directory: str, folder: Path | None = None) -> None:
        self._directory = directory
        self._folder = folder  # where the files are kept; None: no other process will open them
        self._files: dict[str, ColumnFile | RaggedFile] = {}
        self._draws: ColumnFile | None = None
        self._shards: list[int] = []
        self._counts: list[int] = []
        self.num_rows = 0

    def append(self, columns: Arrays, shards: Ints, draws: np.ndarray | None = None) -> None:
        """Add rows. Those of one shard come one after the other, over all calls."""
        if not len(shards):
            return
        if not self._files:
            self._files = {
                name: self._make_file(f"column-{i}", name, isinstance(values, RaggedArray))
                for i, (name, values) in enumerate(columns.items())
            }
        for name, file in self._files.items():
            file.append(columns[name])  # type: ignore[arg-type]  # made for what the column holds
        if draws is not None:
            if self._draws is None:
                self._draws = self._make_column("draws", DRAWS)
            self._draws.append(draws)
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

    def draws(self) -> np.ndarray:
        """How often each row is to be drawn, in proportion, once all rows are in."""
        return np.empty(0) if self._draws is None else self._draws.rows()

    @property
    def row_bytes(self) -> int:
        return sum(file.row_bytes for file in self._files.values())

    def _make_file(self, place: str, name: str, ragged: bool) -> ColumnFile | RaggedFile:
        if not ragged:
            return self._make_column(place, name)
        return RaggedFile(
            self._make_column(place, name), self._make_column(f"{place}-ends", f"{name} (ends)")
        )

    def _make_column(self, place: str, name: str) -> ColumnFile:
        if self._folder is None:
            return ColumnFile.unlinked(name, self._directory)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return ColumnFile.kept(name, self._folder / place)

    def describe(self) -> dict[str, Any]:
        """What must be known to open the files again."""
        return {
            "shards": self._shards,
            "counts": self._counts,
            "columns": [file.describe() for file in self._files.values()],
            "draws": None if self._draws is None else self._draws.describe(),
        }

    @classmethod
    def reopen(cls, folder: Path, description: dict[str, Any]) -> Spool:
        """The spool that another process has sealed and left."""
        spool = cls(str(folder), folder)
        spool._shards, spool._counts = description["shards"], description["counts"]
        spool.num_rows = sum(spool._counts)
        for index, column in enumerate(description["columns"]):
            file = spool._make_file(f"column-{index}", column["name"], "ends" in column)
            file.restore(column)
            spool._files[file.name] = file
        if description["draws"] is not None:
            spool._draws = spool._make_column("draws", DRAWS)
            spool._draws.restore(description["draws"])
        spool.seal()
        return spool

    def descriptors(self) -> list[int]:
        """The open files of the columns, in the order of `describe`."""
        return [one for file in self._files.values() for one in file.descriptors()]

    @classmethod
    def over(cls, descriptors: list[int], description: dict[str, Any]) -> Spool:
        """The columns of a sealed spool whose files another process has opened; without draws."""
        spool = cls("")
        spool._shards, spool._counts = description["shards"], description["counts"]
        spool.num_rows = sum(spool._counts)
        own = iter(descriptors)
        for column in description["columns"]:
            name = column["name"]
            file: ColumnFile | RaggedFile = ColumnFile.opened(name, next(own))
            if "ends" in column:
                ends = ColumnFile.opened(f"{name} (ends)", next(own))
                file = RaggedFile(file, ends)  # type: ignore[arg-type]  # made just above
            file.restore(column)
            spool._files[name] = file
        spool.seal()
        return spool

    def seal(self) -> None:
        """No more rows: map the files."""
        for file in self._files.values():
            file.seal()

    def take(self, rows: Ints) -> Arrays:
        """The given rows, in the given order. The memory is used again once nothing holds it."""
        return {name: file.take(rows) for name, file in self._files.items()}

    def slice(self, start: int, stop: int) -> Arrays:
        """Rows as they were written."""
        return {name: file.slice(start, stop) for name, file in self._files.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._draws is not None:
            self._draws.close()


class ColumnFile:
    """Rows of one shape, one after the other: the file is the tensor itself."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self.name = name
        self._file = file
        self.row_shape: tuple[int, ...] | None = None
        self.dtype: np.dtype[np.generic] | None = None
        self.num_rows = 0
        self._map: mmap.mmap | None = None
        self._array = np.empty(0, np.float32)  # the mapped rows, once sealed
        self._recycler = Recycler()

    @classmethod
    def unlinked(cls, name: str, directory: str) -> ColumnFile:
        descriptor, path = tempfile.mkstemp(prefix="sparkdml-spool-", dir=directory)  # mode 0600
        os.unlink(path)
        return cls(name, os.fdopen(descriptor, "r+b", buffering=0))

    @classmethod
    def kept(cls, name: str, path: Path) -> ColumnFile:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        return cls(name, os.fdopen(descriptor, "r+b", buffering=0))

    @classmethod
    def opened(cls, name: str, descriptor: int) -> ColumnFile:
        """For reading alone."""
        return cls(name, os.fdopen(descriptor, "rb", buffering=0))

    def descriptors(self) -> list[int]:
        return [self._file.fileno()]

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

    @property
    def row_bytes(self) -> int:
        if self.dtype is None:
            return 0
        return int(np.prod(self.row_shape or (), dtype=np.int64)) * self.dtype.itemsize

    def seal(self) -> None:
        """No more rows: map the file."""
        self._array = self.rows()
        self._recycler = Recycler()

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

    def take(self, rows: Ints) -> np.ndarray:
        """The given rows, in the given order. The memory is used again once nothing holds it."""
        array = self._array
        out = self._recycler.array((len(rows), *array.shape[1:]), array.dtype)
        # mode="clip" lets numpy skip a check that costs half of the time; the row numbers are our
        # own.
        return np.take(array, rows, axis=0, out=out, mode="clip")

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Rows as they were written. Copied, since a map can't be handed out as writable."""
        return self._array[start:stop].copy()

    def describe(self) -> dict[str, Any]:
        """What must be known to open the file again."""
        return {
            "name": self.name,
            "dtype": None if self.dtype is None else self.dtype.str,
            "shape": list(self.row_shape or ()),
            "rows": self.num_rows,
        }

    def restore(self, description: dict[str, Any]) -> None:
        if description["dtype"] is not None:
            self.dtype = np.dtype(description["dtype"])
            self.row_shape = tuple(description["shape"])
        self.num_rows = description["rows"]

    def close(self) -> None:
        self._array = np.empty(0, np.float32)
        self._map = None  # unmapped when the last array that views it is gone
        self._file.close()


class RaggedFile:
    """Rows of different lengths: all their elements in one file, and where each ends in another."""

    def __init__(self, elements: ColumnFile, ends: ColumnFile) -> None:
        self.name = elements.name
        self._elements, self._ends = elements, ends

    def append(self, values: RaggedArray) -> None:
        if len(values.values):
            before = self._elements.num_rows
            self._elements.append(values.values)
            self._ends.append(values.offsets[1:] + before)
        else:  # which may not know the shape of an element
            if self._elements.dtype is None:
                self._elements.dtype = values.values.dtype
            self._ends.append(values.offsets[1:] + self._elements.num_rows)

    def descriptors(self) -> list[int]:
        return [*self._elements.descriptors(), *self._ends.descriptors()]

    @property
    def row_bytes(self) -> int:
        elements = self._elements.row_bytes * self._elements.num_rows
        return elements // max(1, self._ends.num_rows) + 8

    def seal(self) -> None:
        self._elements.seal()
        self._ends.seal()

    def take(self, rows: Ints) -> RaggedArray:
        all_ends = self._ends.rows()
        ends = all_ends[rows]
        starts = np.where(rows > 0, all_ends[rows - 1], 0)
        lengths = ends - starts
        return RaggedArray.of_lengths(
            self._elements.take(element_numbers(starts, lengths)), lengths
        )

    def slice(self, start: int, stop: int) -> RaggedArray:
        ends = self._ends.rows()
        first = int(ends[start - 1]) if start else 0
        offsets = np.concatenate(([first], ends[start:stop]))
        return RaggedArray(self._elements.slice(first, int(offsets[-1])), offsets - first)

    def describe(self) -> dict[str, Any]:
        return {**self._elements.describe(), "ends": self._ends.describe()}

    def restore(self, description: dict[str, Any]) -> None:
        self._elements.restore(description)
        self._ends.restore(description["ends"])

    def close(self) -> None:
        self._elements.close()
        self._ends.close()
