"""Rows for validation: a split that is exact within each value of a column, and the rows alone.

For each value the key is sought that cuts off the right number of its rows. Keys are hashes, so
counts by the first bits of the key narrow it down by a factor of 64 a round, and what is left after
one or two rounds is few enough to look at. Nothing is shuffled but those counts. Workers compare
their rows with the keys (see strata.py).

A task that only evaluates reads the rows for validation alone.

Runs at the driver, on the caller's thread; `only_held_out` in the task that evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdml.errors import DataError
from sparkdml.feed.arrow import HASH_COLUMN
from sparkdml.feed.batch import select
from sparkdml.feed.columns.base import quoted
from sparkdml.feed.order import SHARD_BITS
from sparkdml.feed.plan import Chunk, FeedPlan, is_validation
from sparkdml.feed.sharding import hashed, is_held_out
from sparkdml.feed.strata import Strata, Stratum

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame


BITS_PER_ROUND = 6
MAX_VALUES = 2000
MAX_KEYS = 200_000  # to look at one by one

_MASK = (1 << 64) - 1


def with_strata(data: Any, plan: FeedPlan | None) -> FeedPlan | None:
    """The plan with the split that it asks for; runs Spark jobs where there is a column for it."""
    if plan is None or plan.stratify is None or plan.strata is not None:
        return plan
    return replace(plan, strata=find_strata(data, plan))


def find_strata(df: DataFrame, plan: FeedPlan) -> Strata:
    from pyspark import StorageLevel
    from pyspark.sql import functions as F

    assert plan.stratify is not None
    assert isinstance(plan.validation, float)
    rows = hashed(df, plan).select(F.col(quoted(plan.stratify)).alias("value"), _key().alias("key"))
    # Two numbers a row: cheaper to keep than to compute the rows once for each round.
    rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        return Strata(plan.stratify, _search(rows, plan.stratify, plan.validation))
    finally:
        rows.unpersist()


@dataclass(frozen=True)
class _Search:
    """The cut of one value lies among the keys with this prefix; `needed` of them are below it."""

    prefix: int
    needed: int
    num_rows: int
    num_held_out: int  # of all rows of the value


@dataclass(frozen=True)
class _Bucket:
    number: int
    num_rows: int
    least: int
    largest: int


def _search(rows: DataFrame, column: str, fraction: float) -> dict[Any, Stratum]:
    found: dict[Any, Stratum] = {}
    open_: dict[Any, _Search] = {}
    for value, buckets in _count(rows, 0, None, column).items():
        num_rows = sum(bucket.num_rows for bucket in buckets)
        held_out = math.floor(fraction * num_rows + 0.5)
        _narrow(
            value,
            _Search(0, held_out, num_rows, held_out),
            buckets=buckets,
            bits=0,
            found=found,
            open_=open_,
        )
    bits = BITS_PER_ROUND
    while open_ and sum(search.num_rows for search in open_.values()) > MAX_KEYS and bits < 54:
        wanted, open_ = open_, {}
        for value, buckets in _count(rows, bits, wanted, column).items():
            _narrow(value, wanted[value], buckets=buckets, bits=bits, found=found, open_=open_)
        bits += BITS_PER_ROUND
    if open_:
        found.update(_look(rows, bits, open_))
    return found


def _narrow(
    value: Any,
    search: _Search,
    buckets: Iterable[_Bucket],
    bits: int,
    found: dict[Any, Stratum],
    open_: dict[Any, _Search],
) -> None:
    """Find the bucket that the cut goes through."""
    needed = search.needed
    for bucket in sorted(buckets, key=lambda bucket: bucket.number):
        prefix = search.prefix << BITS_PER_ROUND | bucket.number
        if not needed:  # right before this bucket
            first = prefix << (64 - bits - BITS_PER_ROUND)
            found[value] = Stratum(first, 0, search.num_held_out)
            return
        if needed < bucket.num_rows:
            if bucket.least == bucket.largest:  # rows that are all alike
                found[value] = Stratum(bucket.least, needed, search.num_held_out)
            else:
                open_[value] = _Search(prefix, needed, bucket.num_rows, search.num_held_out)
            return
        needed -= bucket.num_rows
    # Behind all of them: the first key that is too large.
    last = ((search.prefix + 1) << (64 - bits)) - 1
    found[value] = Stratum(last, search.num_held_out, search.num_held_out)


def _count(
    rows: DataFrame, bits: int, wanted: dict[Any, _Search] | None, column: str
) -> dict[Any, list[_Bucket]]:
    """The rows of each value by the next bits of their keys."""
    from pyspark.sql import functions as F

    if wanted is not None:
        rows = _with_prefix(rows, bits, wanted)
    next_bits = F.shiftrightunsigned("key", 64 - bits - BITS_PER_ROUND).bitwiseAND(
        F.lit((1 << BITS_PER_ROUND) - 1)
    )
    counted = rows.groupBy("value", next_bits.alias("bucket")).agg(
        F.count(F.lit(1)).alias("n"), F.min("key").alias("least"), F.max("key").alias("largest")
    )
    by_value: dict[Any, list[_Bucket]] = {}
    limit = MAX_VALUES << BITS_PER_ROUND
    for row in counted.limit(limit + 1).collect():
        if row.value is None or row.value != row.value:
            raise DataError(
                f"stratifyCol {column!r} is {'null' if row.value is None else 'NaN'} in "
                "some rows. Every row needs a value: drop such rows, or fill them with coalesce"
            )
        bucket = _Bucket(row.bucket, row.n, row.least & _MASK, row.largest & _MASK)
        by_value.setdefault(row.value, []).append(bucket)
    if len(by_value) > MAX_VALUES or sum(map(len, by_value.values())) > limit:
        raise DataError(
            f"stratifyCol {column!r} has more than {MAX_VALUES:,} different values; a split within "
            "each of them needs a column of few values, such as the label. Group the values, or "
            "leave stratifyCol out"
        )
    return by_value


def _look(rows: DataFrame, bits: int, wanted: dict[Any, _Search]) -> dict[Any, Stratum]:
    """The very key at which each value is cut."""
    from pyspark.sql import functions as F

    counted = _with_prefix(rows, bits, wanted).groupBy("value", "key").agg(F.count(F.lit(1)))
    keys: dict[Any, list[tuple[int, int]]] = {}
    for value, key, count in counted.collect():
        keys.setdefault(value, []).append((key & _MASK, count))
    found = {}
    for value, search in wanted.items():
        needed = search.needed
        for key, count in sorted(keys[value]):
            if needed < count:
                found[value] = Stratum(key, needed, search.num_held_out)
                break
            needed -= count
    return found


def _with_prefix(rows: DataFrame, bits: int, wanted: dict[Any, _Search]) -> DataFrame:
    from pyspark.sql import functions as F

    known = rows.sparkSession.createDataFrame(
        [(value, search.prefix) for value, search in wanted.items()],
        f"wanted {rows.schema['value'].dataType.simpleString()}, prefix bigint",
    )
    has_prefix = F.shiftrightunsigned("key", 64 - bits) == F.col("prefix")
    return rows.join(F.broadcast(known), (F.col("value") == F.col("wanted")) & has_prefix)


def _key() -> SparkColumn:
    """As strata.split_keys says."""
    from pyspark.sql import functions as F

    high = F.shiftleft(HASH_COLUMN, SHARD_BITS)
    return high.bitwiseOR(F.shiftrightunsigned(HASH_COLUMN, 64 - SHARD_BITS))


def held_out_rows(df: DataFrame, plan: FeedPlan) -> DataFrame:
    """In one partition, sorted by hash: no more rows than needed, where Spark can tell which."""
    from pyspark.sql import functions as F

    rows = hashed(df, plan)
    if plan.strata is None and isinstance(plan.validation, float):
        rows = rows.filter(is_held_out(plan.validation))
    elif isinstance(plan.validation, str):
        flag = F.col(quoted(plan.validation))
        rows = rows.filter(flag | flag.isNull())  # a null is refused where the row can be shown
    return rows.repartition(1).sortWithinPartitions(HASH_COLUMN)


def only_held_out(chunks: Iterator[Chunk], plan: FeedPlan) -> Iterator[Chunk]:
    """Of what came of Spark: the workers train on the rest."""
    for chunk in chunks:
        flags = chunk.held_out
        if flags is None:
            assert isinstance(plan.validation, float), "rows are held out by fraction or column"
            flags = is_validation(chunk.hashes, plan.validation)
        if flags.any():
            kept = int(np.count_nonzero(flags))
            columns, hashes = select(chunk.columns, flags), chunk.hashes[flags]
            yield Chunk(columns, hashes, np.ones(kept, dtype=bool))
