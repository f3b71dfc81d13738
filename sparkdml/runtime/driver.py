"""The driver's side of a run: check what can be checked, then submit, and submit again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.run import CheckpointedRun
from sparkdml.feed.feed import FeedPlan
from sparkdml.feed.stratify import with_strata
from sparkdml.runtime import preflight
from sparkdml.runtime.cluster import find_cluster
from sparkdml.runtime.desk import Desk
from sparkdml.runtime.merging import Merge
from sparkdml.runtime.plan import Options
from sparkdml.runtime.reception import OnEvent as OnEvent
from sparkdml.runtime.recovery import recover
from sparkdml.runtime.roles import Role, RolesOf
from sparkdml.runtime.slots import Slots
from sparkdml.runtime.spools import Spools
from sparkdml.runtime.submission import Submission
from sparkdml.runtime.worker import Body

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession


def launch(
    spark: SparkSession,
    body: Body,
    options: Options,
    data: DataFrame | RDD[Any] | None = None,
    feed: FeedPlan | None = None,
    on_event: OnEvent = lambda rank, message: None,
    run: CheckpointedRun | None = None,
    roles_of: RolesOf | None = None,
    make_desk: Callable[[int], Desk | None] = lambda num_workers: None,
    merge: Merge | None = None,
) -> list[Any]:
    """Check everything that can be checked, then run `body` in every task of every role.

    `roles_of` and `make_desk` get the number of workers; `merge` adds up results, on executors
    where they are many. With checkpoints, a run that fails goes on from the newest.
    """
    if roles_of is None:
        reads: Literal["none", "shards"] = "none" if data is None else "shards"
        roles_of = partial(_workers_alone, reads)
    cluster = find_cluster(spark)
    slots = Slots(cluster, options, roles_of)
    settings = preflight.read_settings(cluster.setting)
    preflight.check_settings(
        settings, many=slots.has_open_wires, spools=data is not None, gang=slots.has_gang
    )
    cluster.check_worker_python()
    first_count = slots.wait()
    feed = with_strata(data, feed)

    def count_workers(restarted: bool) -> int:
        return slots.wait_again(first_count) if restarted else first_count

    spools = None if run is None else Spools()

    def submit(count: int, checkpoint: CheckpointPlan | None = None) -> list[Any]:
        start = None if checkpoint is None else checkpoint.resume
        on_event(
            -1,
            {
                "kind": "submission",
                "number": 1 if checkpoint is None else checkpoint.submission,
                "workers": count,
                "from_step": 0 if start is None else start.step,
            },
        )
        return Submission(
            spark,
            cluster,
            body,
            roles_of(count),
            options,
            data,
            feed,
            on_event,
            run,
            checkpoint,
            spools,
            make_desk(count),
            merge,
        ).wait()

    if run is None:
        return submit(first_count)
    assert spools is not None
    try:
        return recover(
            run,
            submit,
            count_workers,
            options.max_restarts,
            on_event,
            spools,
            options.replacement_seconds,
        )
    finally:
        spools.remove_left(spark, cluster.shares_disks)


def _workers_alone(reads: Literal["none", "shards"], num_workers: int) -> list[Role]:
    return [Role("worker", num_workers, reads=reads)]
