"""Tables are cut into parts, the unit of placement, replication and recovery. Pure.

A table is a matrix: a tensor of rows has its rows, any other is one column of elements. A part is a
range of rows, small enough to be sent and replaced quickly.

Consistent hashing with virtual nodes (Karger et al. 1997) assigns parts to servers: each server has
many points on a ring of 64-bit numbers; a key belongs to the first server at or after its own
point, and its replicas to the next different ones. So a server that joins or leaves moves only its
share of the keys, spread over all others. The same servers give the same ring in every process.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparkdml.errors import ParameterError

VIRTUAL_NODES = 64


def point_of(text: str) -> int:
    """Return a text's point on the ring. Python's own hash() differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Ring:
    """A fixed set of servers, each with an id (0, 1, 2, …)."""

    def __init__(self, server_ids: Iterable[int], virtual_nodes: int = VIRTUAL_NODES) -> None:
        self.server_ids = tuple(sorted(set(server_ids)))
        marks = sorted(
            (point_of(f"server {server_id} mark {mark}"), server_id)
            for server_id in self.server_ids
            for mark in range(virtual_nodes)
        )
        self._points = [point for point, _ in marks]
        self._owners = [server_id for _, server_id in marks]

    def owners(self, point: int, count: int) -> tuple[int, ...]:
        """Return the ids of the servers that hold a key: the primary, then its replicas."""
        found: list[int] = []
        wanted = min(count, len(self.server_ids))
        start = bisect_left(self._points, point)
        for step in range(len(self._owners)):
            if len(found) == wanted:
                break
            server_id = self._owners[(start + step) % len(self._owners)]
            if server_id not in found:
                found.append(server_id)
        return tuple(found)


PART_BYTES = 1 << 20
MAX_NAME = 200
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16, torch.bfloat16)

Key = tuple[int, int]  # a table's number, and the number of the part in it
Indexes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """The layout of a named tensor; the same in every worker and server."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    by_row: bool
    part_rows: int  # rows in a part; the last may have fewer

    @classmethod
    def of(cls, name: str, tensor: Tensor, rows: bool, part_bytes: int = PART_BYTES) -> Table:
        if not name or len(name) > MAX_NAME:
            raise ParameterError("name", name, f"a text of 1 to {MAX_NAME} characters")
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ParameterError("tensor.dtype", tensor.dtype, f"one of {allowed}")
        if rows and tensor.dim() < 2:
            raise ParameterError("rows", True, "used with a tensor of two or more dimensions")
        if tensor.numel() == 0:
            raise ParameterError("tensor", f"of shape {tuple(tensor.shape)}", "not empty")
        width = math.prod(tensor.shape[1:]) if rows else 1
        part_rows = max(1, part_bytes // (width * tensor.element_size()))
        return cls(name, tuple(tensor.shape), dtype=tensor.dtype, by_row=rows, part_rows=part_rows)

    @cached_property
    def number(self) -> int:
        return point_of(f"table {self.name}")

    @cached_property
    def layout(self) -> int:
        """A signature: tables with the same name but different layouts have different ones."""
        return point_of(str(sorted(self.to_dict().items())))

    @cached_property
    def num_rows(self) -> int:
        return self.shape[0] if self.by_row else math.prod(self.shape)

    @cached_property
    def width(self) -> int:
        return math.prod(self.shape[1:]) if self.by_row else 1

    @cached_property
    def num_parts(self) -> int:
        return -(-self.num_rows // self.part_rows)

    def key(self, part: int) -> Key:
        return self.number, part

    def range(self, part: int) -> tuple[int, int]:
        start = part * self.part_rows
        return start, min(start + self.part_rows, self.num_rows)

    def num_bytes(self, part: int, rows: Tensor | None) -> int:
        """Return the size of a part, or of some of its rows, in bytes."""
        start, stop = self.range(part)
        count = stop - start if rows is None else len(rows)
        return count * self.width * self.dtype.itemsize

    def matrix(self, tensor: Tensor) -> Tensor:
        """The tensor as (rows, width), without a copy where it is contiguous."""
        return tensor.reshape(self.num_rows, self.width)

    def split_rows(self, rows: Indexes) -> list[tuple[int, slice]]:
        """Which parts hold these sorted rows, and which stretch of them each holds."""
        parts = rows // self.part_rows
        borders = np.flatnonzero(np.diff(parts)) + 1
        starts = [0, *borders.tolist()]
        stops = [*borders.tolist(), len(rows)]
        return [
            (int(parts[start]), slice(start, stop))
            for start, stop in zip(starts, stops, strict=True)
            if stop > start
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": DTYPES.index(self.dtype),
            "by_row": self.by_row,
            "part_rows": self.part_rows,
        }

    @classmethod
    def from_dict(cls, fields: Any) -> Table:
        """Raises ValueError, TypeError or KeyError for what is not a table's layout."""
        shape = tuple(int(size) for size in fields["shape"])
        name, part_rows, dtype = str(fields["name"]), int(fields["part_rows"]), fields["dtype"]
        if not 0 < len(name) <= MAX_NAME or len(shape) > 16 or not all(s > 0 for s in shape):
            raise ValueError("not a table")
        if part_rows < 1 or not 0 <= int(dtype) < len(DTYPES):
            raise ValueError("not a table")
        return cls(name, shape, DTYPES[int(dtype)], bool(fields["by_row"]), part_rows)


def place_of(key: Key) -> int:
    """Return a part's point on the ring."""
    return point_of(f"part {key[0]} {key[1]}")


def as_indexes(rows: object, num_rows: int) -> Indexes:
    """Row numbers as an array, checked."""
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu().numpy()
    found = np.asarray(rows)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ParameterError("rows", f"shape {found.shape} of {found.dtype}", "a list of integers")
    found = found.astype(np.int64, copy=False)
    if found.size and not (found.min() >= 0 and found.max() < num_rows):
        raise ParameterError(
            "rows", f"{found.min()} to {found.max()}", f"between 0 and {num_rows - 1}"
        )
    return found
