"""The Spark jobs whose tasks are workers: from a DataFrame, an RDD or nothing, as a gang or not.

Runs at the driver. A `RoleJob` owns the thread on which its job is submitted and waited for.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from sparkdml.feed.rdd import rank_of_hash, shard_rdd
from sparkdml.feed.sharding import DataFacts, read_facts, shard_dataframe
from sparkdml.feed.validation_split import held_out_rows
from sparkdml.runtime.driver.cluster import Cluster, is_connect
from sparkdml.runtime.protocol.plan import Plan
from sparkdml.runtime.protocol.results import RESULT_SCHEMA, Merge, merge_in_tree
from sparkdml.runtime.protocol.roles import num_tasks
from sparkdml.runtime.worker.main import Body, run_arrow_worker, run_worker

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

Parts = list[tuple[int, int, bytes]]


class Job(Protocol):
    """A job that is ready to be submitted."""

    def collect(self) -> Parts:
        """Submit, wait, and return every worker's pieces of its result."""
        ...

    def facts(self) -> DataFacts | None:
        """What is known of the rows while the workers run."""
        ...


class ArrowJob:
    """Workers fed by a DataFrame, or by nothing."""

    def __init__(
        self,
        source: DataFrame | SparkSession,
        plan: Plan,
        body: Body,
        profile: ResourceProfile | None,
        merge: Merge | None = None,
    ) -> None:
        num_partitions = num_tasks(plan.job_roles)
        self._has_rows = plan.source != "none"
        if not self._has_rows:
            self._session = cast("SparkSession", source)
            rows = self._session.range(0, num_partitions, 1, numPartitions=num_partitions)
        else:
            assert plan.feed is not None
            source = cast("DataFrame", source)
            self._session = source.sparkSession
            if plan.role.reads == "validation":
                rows = held_out_rows(source, plan.feed)
            else:
                rows = self._shard(source, plan, num_partitions)
        worker = partial(run_arrow_worker, plan, body)
        options: dict[str, Any] = {} if profile is None else {"profile": profile}
        self._query = rows.mapInArrow(worker, RESULT_SCHEMA, barrier=plan.role.gang, **options)
        if merge is not None:
            self._query = merge_in_tree(self._query, num_partitions, merge)

    def _shard(self, source: DataFrame, plan: Plan, num_partitions: int) -> DataFrame:
        assert plan.feed is not None
        count = plan.role.count
        missing = [rank for rank in range(count) if rank not in plan.spools]
        return shard_dataframe(
            source,
            plan.feed,
            num_workers=count,
            ranks=missing if plan.spools else None,
            num_partitions=num_partitions,
        )

    def collect(self) -> Parts:
        return [(row.rank, row.part, bytes(row.payload)) for row in self._query.collect()]

    def facts(self) -> DataFacts | None:
        if not self._has_rows or is_connect(self._session):
            return None
        return read_facts(self._query)


class RowsJob:
    """Workers fed by an RDD."""

    def __init__(
        self, rdd: RDD[Any], plan: Plan, body: Body, profile: ResourceProfile | None
    ) -> None:
        sharded = shard_rdd(rdd, plan.seed, plan.role.count, num_tasks(plan.job_roles))
        if plan.spools:
            spooled, count = frozenset(plan.spools), plan.role.count
            sharded = sharded.filter(lambda pair: rank_of_hash(pair[0], count) not in spooled)
        if profile is not None:
            sharded = sharded.withResources(profile)
        worker = partial(run_worker, plan, body)
        gang = plan.role.gang
        self._rdd = (sharded.barrier() if gang else sharded).mapPartitions(worker)

    def collect(self) -> Parts:
        return self._rdd.collect()

    def facts(self) -> DataFacts | None:
        return None  # an RDD's rows are looked at only as they come


def is_rdd(data: object) -> bool:
    from pyspark import RDD

    return isinstance(data, RDD)


def make_job(
    spark: SparkSession,
    data: DataFrame | RDD[Any] | None,
    plan: Plan,
    body: Body,
    profile: ResourceProfile | None,
    merge: Merge | None = None,
) -> Job:
    """With `merge`, results are added up on the executors, so that few reach the driver."""
    if plan.source == "rows":
        assert merge is None, "results over an RDD are not merged on executors"
        return RowsJob(cast("RDD[Any]", data), plan, body, profile)
    return ArrowJob(
        spark if data is None else cast("DataFrame", data),
        plan,
        body=body,
        profile=profile,
        merge=merge,
    )


class RoleJob:
    """A job on a thread and in a job group of its own, from its start until Spark has ended it."""

    def __init__(self, cluster: Cluster, job: Job, plan: Plan, name: str) -> None:
        self.job, self.plan = job, plan
        self.parts: Parts = []
        self.error: Exception | None = None
        self._cluster = cluster
        self._group = plan.run_id if not plan.first_number else f"{plan.run_id}-{plan.role.name}"
        title = name if not plan.first_number else f"{name}, {plan.role.name}"
        self._thread: threading.Thread = cluster.thread(self._submit, self._group, title)

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role.name for role in self.plan.job_roles)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def cancel(self) -> None:
        if not self.is_running:
            return
        with suppress(OSError):  # Spark's driver process is gone, and the job with it
            self._cluster.cancel(self._group)

    def _submit(self) -> None:
        try:
            self.parts = self.job.collect()
        except Exception as error:
            self.error = error
