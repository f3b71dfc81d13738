"""Rows into the partition of a given number: `repartitionById`, and its twin for Spark 4.0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_BITS = 0xFFFFFFFF
_SPARKS_SEED = 42


def place(df: DataFrame, num_partitions: int, partition: Column) -> DataFrame:
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
