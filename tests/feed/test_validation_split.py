"""The stratified split: exact within each value, found without a shuffle of the rows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

from sparkdml.errors import DataError, ParameterError
from sparkdml.feed import strata, validation_split
from sparkdml.feed.arrow import read_arrow
from sparkdml.feed.columns.schema import describe_columns
from sparkdml.feed.feed import FeedPlan
from sparkdml.feed.order import owner_of, shard_of
from sparkdml.feed.sharding import read_facts, shard_dataframe
from sparkdml.feed.strata import Splitter, Strata, Stratum, split_keys


def held_out_of(fraction, count):
    return int(np.floor(fraction * count + 0.5))


# -- the worker's side ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), min_size=1, max_size=200),
    fraction=st.floats(0.01, 0.99),
    num_workers=st.integers(1, 3),
    chunk_rows=st.integers(1, 50),
)
def test_a_splitter_holds_out_the_first_rows_of_each_value(rows, fraction, num_workers, chunk_rows):
    """Few hashes, so that many rows are alike; a hash has only one value, as in real data."""
    values = np.array([f"{v}{h % 3}" for v, h in rows])
    hashes = np.array([hash_of(v, h) for v, h in rows])
    by_value = {}
    for value in np.unique(values):
        keys = np.sort(split_keys(hashes[values == value]))
        wanted = held_out_of(fraction, len(keys))
        if wanted == len(keys):
            by_value[str(value)] = Stratum(2**64 - 1, wanted, wanted)
        else:
            ties = wanted - int((keys < keys[wanted]).sum())
            by_value[str(value)] = Stratum(int(keys[wanted]), ties, wanted)
    strata = Strata("kind", by_value)
    found = dict.fromkeys(by_value, 0)
    for rank in range(num_workers):
        splitter = Splitter(strata)
        mine = np.flatnonzero(owner_of(shard_of(hashes), num_workers) == rank)
        mine = mine[np.argsort(hashes[mine], kind="stable")]
        for start in range(0, len(mine), chunk_rows):
            part = mine[start : start + chunk_rows]
            held_out = splitter.held_out(pa.array(values[part].tolist()), hashes[part])
            for value in values[part][held_out]:
                found[str(value)] += 1
    assert found == {value: stratum.num_held_out for value, stratum in by_value.items()}
    assert strata.num_held_out == sum(found.values())


def hash_of(value, number):
    mixed = (ord(value) * 1_000_003 + number) * 0x9E3779B97F4A7C15 % 2**64
    return np.uint64(mixed).view(np.int64)


def test_a_value_that_was_not_counted():
    splitter = Splitter(Strata("kind", {"a": Stratum(0, 0, 0)}))
    with pytest.raises(DataError, match="stratifyCol 'kind' has the value 'b', which it did not"):
        splitter.held_out(pa.array(["a", "b"]), np.arange(2))


# -- the driver's side ----------------------------------------------------------------------------


def plan_of(df, fraction=0.3, **fields):
    columns = [name for name in df.columns if name != "kind"]
    return FeedPlan(
        tuple(describe_columns(df.schema, columns)),
        validation=fraction,
        stratify="kind",
        **fields,
    )


def split(df, plan, num_workers=2):
    """(held out, all) for each value, as the workers split the rows."""
    plan = validation_split.with_strata(df, plan)
    sharded = shard_dataframe(df, plan, num_workers)
    rows = sharded.withColumn("rank", F.spark_partition_id()).toArrow()
    counts = {}
    for rank in range(num_workers):
        mine = rows.filter(pa.compute.equal(rows["rank"], rank)).to_batches(max_chunksize=37)
        for batch, chunk in zip(mine, read_arrow(iter(mine), plan), strict=True):
            for value, held_out in zip(batch["kind"].to_pylist(), chunk.held_out, strict=True):
                has, of = counts.get(value, (0, 0))
                counts[value] = (has + int(held_out), of + 1)
    return counts


@pytest.mark.parametrize("max_keys", [validation_split.MAX_KEYS, 5])
@pytest.mark.parametrize("distinct", [100_000, 7])
def test_exact_to_a_row_within_each_value(spark, monkeypatch, max_keys, distinct):
    """However many rounds it takes, and however many rows are alike."""
    monkeypatch.setattr(validation_split, "MAX_KEYS", max_keys)
    df = spark.range(4000).selectExpr(
        f"id % {distinct} as x",
        "case when id % 97 = 0 then 'rare' when id % 3 = 0 then 'b' else 'often' end as kind",
    )
    counts = split(df, plan_of(df))
    assert sum(of for _, of in counts.values()) == 4000
    assert {v: has for v, (has, _) in counts.items()} == {
        v: held_out_of(0.3, of) for v, (_, of) in counts.items()
    }


@pytest.mark.parametrize(
    "kind",
    ["cast(id % 3 as double)", "id % 4", "id % 2 = 0", "date_add(date'2024-01-01', int(id % 3))"],
)
def test_values_of_several_types(spark, kind):
    df = spark.range(200).selectExpr("id as x", f"{kind} as kind")
    counts = split(df, plan_of(df, 0.25))
    assert all(has == held_out_of(0.25, of) for has, of in counts.values())


def test_the_same_rows_whatever_the_partitions_and_workers(spark):
    df = spark.range(300).selectExpr("id as x", "string(id % 3) as kind")
    plan = validation_split.with_strata(df, plan_of(df))
    assert validation_split.with_strata(df.repartition(5), plan_of(df)).strata == plan.strata
    assert validation_split.with_strata(df, plan_of(df, seed=9)).strata != plan.strata
    sharded = shard_dataframe(df, plan, 2)
    sharded.collect()
    assert read_facts(sharded).num_validation_rows == 90


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("if(id = 7, null, 'a')", "stratifyCol 'kind' is null in some rows"),
        ("if(id = 7, double('NaN'), 1.0D)", "stratifyCol 'kind' is NaN in some rows"),
        ("string(id)", "more than 2,000 different values"),
    ],
)
def test_values_that_cannot_be_split_by(spark, kind, words):
    df = spark.range(3000).selectExpr("id as x", f"{kind} as kind")
    with pytest.raises(DataError, match=words):
        validation_split.with_strata(df, plan_of(df))


def test_what_the_schema_shows(spark):
    df = spark.range(1).selectExpr("id as x", "array(id) as kind")
    with pytest.raises(DataError, match="'kind' has the type array<bigint>; it must be one of str"):
        strata.check_stratify(df.schema, "kind", 0.1)
    with pytest.raises(DataError, match="no column 'sort' for stratifyCol=: there is x, kind"):
        strata.check_stratify(df.schema, "sort", 0.1)
    for validation in (None, "is_test"):
        with pytest.raises(ParameterError, match="stratifyCol must be used with validation="):
            strata.check_stratify(df.schema, "kind", validation)
