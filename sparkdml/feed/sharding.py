"""The driver's side of the feed: cut a DataFrame into shards by a hash of the row, one way only.

`repartition(n)` gives other partitions from job to job; a hash of the row's content does not. Rows
with the same content are interchangeable, so nothing else is needed to make two runs alike, on any
number of cores. Each worker's rows arrive sorted by hash.

While Spark writes the shuffle, it also counts: rows, nulls, the shortest and longest array. Those
facts are there before the first worker starts, so bad rows are found before the first step.

Runs at the driver, on the caller's thread or on the one that submits the job; only Spark sees rows.
"""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from sparkdml.feed.arrow import HASH_COLUMN
from sparkdml.feed.columns.base import quoted
from sparkdml.feed.order import SHARD_BITS
from sparkdml.feed.plan import FeedPlan

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame

FACTS = "sparkdml"

_BITS = 0xFFFFFFFF
_SPARKS_SEED = 42


@dataclass(frozen=True)
class DataFacts:
    """What the shuffle found out about the rows."""

    num_rows: int
    num_validation_rows: int = 0
    num_null_rows: int = 0  # with a null in any column, or in an array
    hash_sum: int = 0  # of the rows' hashes: tells one data set from another
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict)  # shortest, longest

    def problem(self) -> str | None:
        """Why the rows can't be trained on, or None. The worker that has such a row names it."""
        if self.num_null_rows:
            return f"{self.num_null_rows:,} of {self.num_rows:,} rows have nulls"
        for name, (shortest, longest) in self.lengths.items():
            if shortest != longest:
                return f"column {name!r} has between {shortest} and {longest} elements a row"
        return None


def shard_dataframe(
    df: DataFrame,
    plan: FeedPlan,
    num_workers: int,
    ranks: Sequence[int] | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """The rows with their hash, in one partition a worker, each sorted by hash.

    With `ranks`, only the rows of those workers; the facts are of all rows all the same. Further
    partitions, up to `num_partitions`, are empty: for tasks that read nothing.
    """
    from pyspark.sql import functions as F

    counted = hashed(df, plan).observe(FACTS, *_fact_columns(plan, df))
    shard = F.shiftrightunsigned(HASH_COLUMN, 64 - SHARD_BITS)
    owner = (shard % F.lit(num_workers)).cast("int")  # as order.owner_of says
    if ranks is not None:
        counted = counted.filter(owner.isin(list(ranks)))
    # Different rows with one hash are rare but possible: their content decides.
    unsorted = {column.name for column in (*plan.inputs, *plan.columns) if not column.is_sort_key}
    ties = [quoted(name) for name in counted.columns if name not in {*unsorted, HASH_COLUMN}]
    return place(counted, num_partitions or num_workers, owner).sortWithinPartitions(
        HASH_COLUMN, *ties
    )


def hashed(df: DataFrame, plan: FeedPlan) -> DataFrame:
    """The columns that the workers need, with the hash that places each row."""
    from pyspark.sql import functions as F

    columns = {column.name: column.spark_value() for column in (*plan.inputs, *plan.columns)}
    marks = (plan.validation if isinstance(plan.validation, str) else None, plan.sampling)
    for name in (*marks, plan.stratify):
        if name is not None and name not in columns:
            columns[name] = F.col(quoted(name))
    return df.select(*(value.alias(name) for name, value in columns.items())).withColumn(
        HASH_COLUMN,
        F.xxhash64(F.lit(plan.seed), *(F.col(quoted(name)) for name in sorted(columns))),
    )


def count_rows(df: DataFrame, plan: FeedPlan) -> dict[str, int]:
    """The rows' number and the sum of their hashes, by a job of its own."""
    from pyspark.sql import functions as F

    row = hashed(df, plan).agg(F.count(F.lit(1)).alias("rows"), _hash_sum().alias("sum")).first()
    assert row is not None
    return {"num_rows": row["rows"], "hash_sum": row["sum"] or 0}


def read_facts(query: DataFrame) -> DataFacts | None:
    """The facts of a running query, once its shuffle is written; None where Spark can't tell."""
    observed = query._jdf.queryExecution().observedMetrics().get(FACTS)
    return None if observed.isEmpty() else facts_of(json.loads(observed.get().json()))


def facts_of(observed: dict[str, Any]) -> DataFacts:
    """Spark's row of observed metrics, which leaves out what is null or says so, as facts."""
    shortest, longest = (
        {
            key.partition(":")[2]: int(value)
            for key, value in observed.items()
            if key.startswith(kind + ":") and value is not None
        }
        for kind in ("shortest", "longest")
    )
    return DataFacts(
        num_rows=observed["rows"],
        num_validation_rows=observed.get("validation") or 0,
        num_null_rows=observed.get("nulls") or 0,
        hash_sum=observed.get("hash_sum") or 0,
        lengths={name: (shortest[name], longest[name]) for name in shortest},
    )


def warn_if_not_deterministic(df: DataFrame) -> None:
    """Rows that are computed again after a failure must be the same rows."""
    if not hasattr(df, "_jdf"):
        return  # Spark Connect does not tell
    if df._jdf.queryExecution().analyzed().deterministic():
        return
    warnings.warn(
        "the data is computed by an expression that is not deterministic (rand(), uuid(), a UDF "
        "marked so): after a failure Spark may compute other rows, and the run could not be "
        "resumed. Write the data out, or persist it on reliable storage, before training",
        stacklevel=4,
    )


def _fact_columns(plan: FeedPlan, df: DataFrame) -> list[SparkColumn]:
    """As few aggregates as possible: each is computed for every row, outside of compiled code."""
    from pyspark.sql import functions as F

    facts = {
        "rows": F.count(F.lit(1)),
        "hash_sum": _hash_sum(),
    }
    if plan.strata is not None:
        facts["validation"] = F.max(F.lit(plan.strata.num_held_out))
    elif isinstance(plan.validation, float):
        facts["validation"] = F.count_if(is_held_out(plan.validation))
    elif plan.validation is not None:
        facts["validation"] = F.count_if(F.col(quoted(plan.validation)))
    # What preprocess is given, only preprocess can judge; and it runs before the first step.
    judged = plan.columns if plan.preprocess is None else ()
    nulls = [
        check for column in judged for check in column.spark_null_checks(df.schema[column.name])
    ]
    if isinstance(plan.validation, str) and df.schema[plan.validation].nullable:
        nulls.append(F.col(quoted(plan.validation)).isNull())
    if nulls:
        facts["nulls"] = F.count_if(reduce(operator.or_, nulls))
    for column in judged:
        for name, (shortest, longest) in column.spark_lengths().items():
            facts[f"shortest:{name}"], facts[f"longest:{name}"] = F.min(shortest), F.max(longest)
    return [expression.alias(name) for name, expression in facts.items()]


def is_held_out(fraction: float) -> SparkColumn:
    """As feed.is_validation says."""
    from pyspark.sql import functions as F

    low_bits = F.col(HASH_COLUMN).bitwiseAND(F.lit(0xFFFFFF))
    return low_bits < F.lit(round(fraction * (1 << 24)))


def _hash_sum() -> SparkColumn:
    """Of the low 31 bits: a sum over four billion rows still fits into a long."""
    from pyspark.sql import functions as F

    return F.sum(F.col(HASH_COLUMN).bitwiseAND(F.lit(0x7FFFFFFF)))


def place(df: DataFrame, num_partitions: int, partition: SparkColumn) -> DataFrame:
    """Each row in the partition that the integer column names."""
    if hasattr(df, "repartitionById"):  # new in Spark 4.1
        return df.repartitionById(num_partitions, partition)
    from pyspark.sql import functions as F

    # Hash partitioning takes the hash of a key, so each partition gets a key that leads to it.
    keys = F.array(*(F.lit(key) for key in keys_of(num_partitions)))
    return df.repartition(num_partitions, F.element_at(keys, partition + F.lit(1)))


def keys_of(num_partitions: int) -> list[int]:
    """For each partition the smallest integer that Spark's hash partitioning puts there."""
    found: dict[int, int] = {}
    key = 0
    while len(found) < num_partitions:
        found.setdefault(hash_of_int(key) % num_partitions, key)
        key += 1
    return [found[partition] for partition in range(num_partitions)]


def hash_of_int(value: int) -> int:
    """Murmur3 of a 32-bit integer, as Spark's `hash` has it."""
    mixed = value * 0xCC9E2D51 & _BITS
    mixed = _rotated(mixed, 15) * 0x1B873593 & _BITS
    result = (_rotated(_SPARKS_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _BITS
    result ^= 4  # bytes
    result = (result ^ result >> 16) * 0x85EBCA6B & _BITS
    result = (result ^ result >> 13) * 0xC2B2AE35 & _BITS
    result ^= result >> 16
    return result - (1 << 32) if result >> 31 else result


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & _BITS
