"""Results on their way from tasks to the driver: cut into pieces, joined, and merged in a tree.

Tasks cut their results, and the driver joins them. Where a run merges its results, it does so on
the executors, like treeAggregate: one task joins the pieces of a few results, adds them up, and
yields the sum as pieces of the same form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkdml.feed.sharding import place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Merge = Callable[[list[Any]], Any]
Piece = tuple[int, int, bytes]

RESULT_SCHEMA = "rank int, part int, payload binary"
RESULT_PART_BYTES = 16 << 20


def merge_in_tree(pieces: DataFrame, count: int, merge: Merge) -> DataFrame:
    """Fewer results, of the same form; those of few workers are left for the driver."""
    from pyspark.sql import functions as F

    fan_in = max(math.ceil(math.sqrt(count)), 2)
    while count > fan_in + math.ceil(count / fan_in):  # as Spark's treeAggregate decides it
        count = math.ceil(count / fan_in)
        group = (F.col("rank") % F.lit(count)).cast("int")
        merged = partial(_merge_arrow, merge)
        pieces = place(pieces, count, group).mapInArrow(merged, RESULT_SCHEMA)
    return pieces


def join_pieces(pieces: Iterable[Piece]) -> dict[int, Any]:
    """Every rank's result, put together from its pieces, which came by Spark's own channel."""
    from pyspark import cloudpickle

    payloads: dict[int, list[bytes]] = {}
    for rank, _, payload in sorted(pieces, key=lambda piece: piece[:2]):
        payloads.setdefault(rank, []).append(payload)
    return {rank: cloudpickle.loads(b"".join(payloads[rank])) for rank in sorted(payloads)}


def cut_pieces(rank: int, payload: bytes) -> Iterator[Piece]:
    for part, start in enumerate(range(0, len(payload), RESULT_PART_BYTES)):
        yield rank, part, payload[start : start + RESULT_PART_BYTES]


def to_arrow(piece: Piece) -> pa.RecordBatch:
    rank, part, payload = piece
    return pa.RecordBatch.from_arrays(
        [pa.array([rank], pa.int32()), pa.array([part], pa.int32()), pa.array([payload])],
        names=["rank", "part", "payload"],
    )


def _merge_arrow(merge: Merge, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import cloudpickle

    pieces = [
        (row["rank"], row["part"], row["payload"]) for batch in batches for row in batch.to_pylist()
    ]
    results = join_pieces(pieces)
    if results:
        merged: bytes = cloudpickle.dumps(merge(list(results.values())))  # type: ignore[no-untyped-call]
        # The groups of the next level are those of this one, divided: ranks stay spread.
        yield from map(to_arrow, cut_pieces(min(results), merged))
