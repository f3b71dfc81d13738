"""The driver's side of a run: check what can be checked, then submit, and submit again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.run import CheckpointedRun
from sparkdml.feed.feed import FeedPlan
from sparkdml.feed.stratify import with_strata
from sparkdml.runtime import preflight
from sparkdml.runtime.cluster import find_cluster
from sparkdml.runtime.plan import Options, Role
from sparkdml.runtime.recovery import recover
from sparkdml.runtime.spools import Spools
from sparkdml.runtime.submission import OnEvent as OnEvent
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
) -> list[Any]:
    """Check everything that can be checked, then run `body` in every worker.

    With checkpoints, a run that fails goes on from the newest.
    """
    cluster = find_cluster(spark)
    many = options.num_workers is None or options.num_workers > 1
    settings = preflight.read_settings(cluster.setting)
    preflight.check_settings(settings, many=many, spools=data is not None)
    cluster.check_worker_python()
    profile = cluster.task_profile(options.resources)
    first_count = cluster.wait_for_slots(
        options.num_workers, options.resources, profile, options.slot_timeout
    )
    feed = with_strata(data, feed)

    def count_workers(restarted: bool) -> int:
        if not restarted:
            return first_count
        return cluster.wait_for_replacements(
            first_count,
            min(options.min_workers, first_count),
            options.resources,
            profile,
            options.replacement_seconds,
        )

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
        role = Role("worker", count, reads="none" if data is None else "shards")
        return Submission(
            spark,
            cluster,
            body,
            role,
            options,
            data,
            feed,
            profile,
            on_event,
            run,
            checkpoint,
            spools,
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
        spools.remove_left(spark)
