"""The driver's side of the feed on a real session: the same shards anywhere, and the facts."""

import pytest
from pyspark.sql import functions as F

from sparkdml.feed.columns.schema import describe_columns
from sparkdml.feed.feed import FeedPlan
from sparkdml.feed.sharding import (
    DataFacts,
    facts_of,
    hash_of_int,
    keys_of,
    place,
    read_facts,
    shard_dataframe,
)


def plan_of(df, **fields):
    return FeedPlan(tuple(describe_columns(df.schema, df.columns)), **fields)


def partitions(df, num_workers, **fields):
    sharded = shard_dataframe(df, plan_of(df, **fields), num_workers)
    found = {rank: [] for rank in range(num_workers)}
    for rank, *row in sharded.select(F.spark_partition_id(), "*").collect():
        found[rank].append(row)
    return list(found.values())


def facts(df, **fields):
    sharded = shard_dataframe(df, plan_of(df, **fields), 2)
    sharded.collect()
    return read_facts(sharded)


def test_the_same_partitions_whatever_the_input_looks_like(spark):
    rows = spark.range(500).select("id", (F.col("id") % 3).cast("float").alias("a.b"))
    expected = partitions(rows, 3)
    assert [len(part) for part in expected] == [len(part) for part in partitions(rows, 3)]
    assert sum(map(len, expected)) == 500
    for other in (rows.repartition(7), rows.orderBy(F.col("id").desc()), rows.coalesce(1)):
        assert partitions(other, 3) == expected


def test_another_seed_deals_differently(spark):
    rows = spark.range(200)
    assert partitions(rows, 2, seed=1) != partitions(rows, 2, seed=2)


def test_duplicate_rows_are_all_there(spark):
    rows = spark.range(100).select((F.col("id") % 2).alias("x"))
    parts = partitions(rows, 3)
    assert sorted(x for part in parts for x, _ in part) == [0] * 50 + [1] * 50


def test_facts_of_good_rows(spark):
    rows = spark.range(1000).select("id", F.array(F.lit(1.0), F.lit(2.0)).alias("x"))
    found = facts(rows, validation=0.25)
    assert found.num_rows == 1000
    assert 200 < found.num_validation_rows < 300
    assert found.lengths == {"x": (2, 2)}
    assert found.problem() is None
    assert found.hash_sum == facts(rows.repartition(5), validation=0.25).hash_sum
    assert found.hash_sum != facts(rows.withColumn("id", F.col("id") + 1)).hash_sum


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("if(id = 7, null, array(1.0D, 2.0D))", "1 of 10 rows have nulls"),
        ("if(id = 7, array(1.0D, null), array(1.0D, 2.0D))", "1 of 10 rows have nulls"),
        ("if(id = 7, array(true, null), array(true, true))", "1 of 10 rows have nulls"),
        ("if(id = 7, array(1L), array(1L, 2L))", "'x' has between 1 and 2 elements a row"),
    ],
)
def test_facts_of_bad_rows(spark, value, words):
    rows = spark.range(10).selectExpr("id", f"{value} as x")
    assert words in facts(rows).problem()


def test_facts_of_vectors(spark):
    from pyspark.ml.linalg import Vectors

    rows = spark.createDataFrame(
        [(Vectors.dense([1.0, 2.0]),), (Vectors.sparse(3, [0], [1.0]),)], ["v"]
    )
    assert facts(rows).lengths == {"v": (2, 3)}


def test_facts_where_there_is_nothing():
    assert facts_of({"rows": 0}) == DataFacts(num_rows=0)
    # As limit(0) has it, which Spark makes an empty relation of.
    nulls = dict.fromkeys(["validation", "nulls", "hash_sum", "shortest:x", "longest:x"])
    assert facts_of({"rows": 0, **nulls}) == DataFacts(num_rows=0)


def test_a_query_without_facts(spark):
    assert read_facts(spark.range(3)) is None


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_each_partition_has_a_key(count):
    keys = keys_of(count)
    assert [hash_of_int(key) % count for key in keys] == list(range(count))


def test_the_hash_is_sparks(spark):
    numbers = [0, 1, 2, 41, 12345, 2**31 - 1]
    rows = spark.createDataFrame([(n,) for n in numbers], "n int").select(F.hash("n").alias("h"))
    assert [row.h for row in rows.collect()] == [hash_of_int(n) for n in numbers]


@pytest.mark.parametrize("has_method", [True, False])
def test_rows_go_where_they_are_sent(spark, monkeypatch, has_method):
    from pyspark.sql.classic.dataframe import DataFrame as Classic

    rows = spark.range(60).withColumn("owner", (F.col("id") % 3).cast("int"))
    if not has_method:
        from pyspark.sql import DataFrame

        monkeypatch.delattr(Classic, "repartitionById")
        monkeypatch.delattr(DataFrame, "repartitionById")
    placed = place(rows, 3, F.col("owner")).withColumn("where", F.spark_partition_id())
    found = placed.collect()
    assert len(found) == 60
    assert all(row["where"] == row["owner"] for row in found)
