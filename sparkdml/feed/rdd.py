"""RDDs as chunks for the feed: any Python rows, placed by a hash of their content.

A dict or a Row gives its fields as columns, a tuple `_1`, `_2`, … as Spark names them, and anything
else the single column `value`. The driver cuts the RDD; its rows are hashed in Spark's tasks, and
read in the worker, on the thread that reads the stream.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdml.errors import DataError
from sparkdml.feed.columns.base import show_values
from sparkdml.feed.order import owner_of, shard_of
from sparkdml.feed.plan import Arrays, Chunk, FeedPlan

if TYPE_CHECKING:
    from pyspark import RDD

ROWS_PER_CHUNK = 4096


def shard_rdd(
    rdd: RDD[Any], seed: int, num_workers: int, num_partitions: int | None = None
) -> RDD[tuple[int, Any]]:
    """(hash, row) pairs in one partition a worker, each sorted by hash; the rest are empty."""
    salt = str(seed).encode()
    return rdd.map(lambda row: (stable_hash(row, salt), row)).repartitionAndSortWithinPartitions(
        num_partitions or num_workers, lambda key: rank_of_hash(key, num_workers)
    )


def rank_of_hash(key: int, num_workers: int) -> int:
    return owner_of(int(shard_of(np.array([key]))[0]), num_workers)


def stable_hash(row: Any, salt: bytes = b"") -> int:
    """A 64-bit hash of a row's content, the same in every process."""
    digest = hashlib.blake2b(salt, digest_size=8)
    _absorb(row, digest)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _absorb(value: Any, digest: hashlib.blake2b) -> None:
    # Not a pickle of the whole: its bytes depend on which parts of the row are one object.
    digest.update(type(value).__name__.encode() + b"(")
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            _absorb(key, digest)
            _absorb(value[key], digest)
    elif isinstance(value, tuple | list):
        for item in value:
            _absorb(item, digest)
    elif isinstance(value, str):
        digest.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        digest.update(value)
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        digest.update(repr(value).encode())
    else:
        digest.update(pickle.dumps(value, protocol=4))
    digest.update(b")")


def read_rows(pairs: Iterator[tuple[int, Any]], plan: FeedPlan) -> Iterator[Chunk]:
    """Chunks of columns from (hash, row) pairs. `plan.columns` is not needed: rows tell."""
    while part := list(islice(pairs, ROWS_PER_CHUNK)):
        rows = [as_fields(row) for _, row in part]
        hashes = np.fromiter((key for key, _ in part), dtype=np.int64, count=len(part))
        fields = {name: _column(name, rows) for name in rows[0]}
        held_out = None
        if isinstance(plan.validation, str):
            held_out = fields.pop(plan.validation).astype(bool)
        columns: Arrays = {**fields}
        yield Chunk(columns, hashes, held_out)


def as_fields(row: Any) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    if isinstance(row, tuple):
        names = getattr(row, "__fields__", None) or getattr(row, "_fields", None)
        return dict(zip(names or [f"_{i + 1}" for i in range(len(row))], row, strict=True))
    return {"value": row}


def _column(name: str, rows: list[dict[str, Any]]) -> np.ndarray:
    values = []
    for row in rows:
        if row.get(name) is None:
            raise DataError(
                f"field {name!r} is missing or None in the row {show_values(row)}. Every row of "
                "an RDD needs the same fields, with values"
            )
        values.append(row[name])
    try:
        column = np.asarray(values)
    except ValueError:
        first = np.shape(values[0])
        odd = next(i for i, value in enumerate(values) if np.shape(value) != first)
        raise DataError(
            f"field {name!r} has the shape {list(np.shape(values[odd]))} in the row "
            f"{show_values(rows[odd])}, but {list(first)} in others. Pad or cut before training"
        ) from None
    if column.dtype.kind not in "biuf":
        raise DataError(
            f"field {name!r} has values of type {type(values[0]).__name__}, which can't become a "
            "tensor. Map the RDD to numbers or numpy arrays, or read plain rows with ctx.rows()"
        )
    return column
