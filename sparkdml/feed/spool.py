"""The spool: a worker's rows on its local disk, one file a column, memory-mapped once written.

A column file is the tensor itself, row after row, so that a batch of any rows is one gather out of
the page cache. The files are unlinked as soon as they are open: the space is given back when the
process ends, however it ends, and nobody else can read them. Where a run may be started again after
a failure, they lie in a folder instead, which the worker that takes this one's place can open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparkdml.feed.column_file import ColumnFile, RaggedFile
from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Arrays
from sparkdml.feed.ragged import RaggedArray

DRAWS = "__sparkdml_draws"  # a column of the spool that no batch has: how often a row is drawn


class Spool:
    """All columns of the rows that one worker owns, with the shard that each row belongs to."""

    def __init__(self, directory: str, folder: Path | None = None) -> None:
        self._directory = directory
        self._folder = folder  # where the files are kept; None: nobody else will want them
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
        """The given rows, in the given order. The memory is used again once nobody holds it."""
        return {name: file.take(rows) for name, file in self._files.items()}

    def slice(self, start: int, stop: int) -> Arrays:
        """Rows as they were written."""
        return {name: file.slice(start, stop) for name, file in self._files.items()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._draws is not None:
            self._draws.close()
