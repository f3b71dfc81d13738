"""Rows go where they are sent, with and without `repartitionById`."""

import pytest

from sparkdml.feed.placement import hash_of_int, keys_of, place


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_each_partition_has_a_key(count):
    keys = keys_of(count)
    assert [hash_of_int(key) % count for key in keys] == list(range(count))


def test_the_hash_is_sparks(spark):
    from pyspark.sql import functions as F

    numbers = [0, 1, 2, 41, 12345, 2**31 - 1]
    rows = spark.createDataFrame([(n,) for n in numbers], "n int").select(F.hash("n").alias("h"))
    assert [row.h for row in rows.collect()] == [hash_of_int(n) for n in numbers]


@pytest.mark.parametrize("has_method", [True, False])
def test_rows_go_where_they_are_sent(spark, monkeypatch, has_method):
    from pyspark.sql import functions as F
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
