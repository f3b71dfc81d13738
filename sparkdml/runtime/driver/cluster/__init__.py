"""The cluster behind a session, and what may be asked of it: classic or Spark Connect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.runtime.driver.cluster.base import Cluster as Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_connect(spark: SparkSession) -> bool:
    """Whether the session speaks to its driver by Spark Connect, so that there is no JVM here."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def find_cluster(spark: SparkSession) -> Cluster:
    if is_connect(spark):
        from sparkdml.runtime.driver.cluster.connect import ConnectCluster

        return ConnectCluster(spark)
    from sparkdml.runtime.driver.cluster.classic import ClassicCluster

    return ClassicCluster(spark)
