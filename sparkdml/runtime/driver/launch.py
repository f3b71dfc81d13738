"""Submits a run again and again until it ends: from the newest checkpoint, on what is left.

The driver's side of a run: check what can be checked, then submit, and submit again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.errors import StoreError
from sparkdml.feed.feed import FeedPlan
from sparkdml.feed.validation_split import with_strata
from sparkdml.runtime.driver import preflight
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun
from sparkdml.runtime.driver.cluster import find_cluster
from sparkdml.runtime.driver.dispatcher import OnEvent as OnEvent
from sparkdml.runtime.driver.failures import Restarts, failed_step, one_line
from sparkdml.runtime.driver.slots import Slots
from sparkdml.runtime.driver.spools import Spools
from sparkdml.runtime.driver.submission import Submission
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.results import Merge
from sparkdml.runtime.protocol.roles import Role, RolesOf
from sparkdml.runtime.protocol.service import DriverService
from sparkdml.runtime.worker.main import Body

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

    from sparkdml.runtime.driver.spools import Spools


Submit = Callable[[int, CheckpointPlan], list[Any]]


def recover(
    run: CheckpointedRun,
    submit: Submit,
    count_workers: Callable[[bool], int],
    max_restarts: int,
    on_event: OnEvent,
    spools: Spools,
    patience_seconds: float,
) -> list[Any]:
    """Results of the submission that came through.

    `submit(num_workers, plan)` runs the workers once; `count_workers(restarted)` waits for slots.
    After a failure, a store that can't be reached is waited for, `patience_seconds` at most.
    """
    restarts = Restarts(max_restarts)
    restarted = False
    while True:
        num_workers = count_workers(restarted)
        excuses = len(run.rejected) + spools.num_losses
        plan = _begin(
            run,
            num_workers,
            restarted=restarted,
            restarts=restarts,
            patience_seconds=patience_seconds,
        )
        try:
            results = submit(num_workers, plan)
        except Exception as error:
            spools.left_behind()
            run.end("failed", one_line(error), failed_step(error))
            restarted = True
            if len(run.rejected) + spools.num_losses > excuses:
                continue  # a damaged checkpoint, or a spool that is gone: there is another way
            newest = -1 if run.newest is None else run.newest.step
            refusal = restarts.why_not(error, newest, plan.resume.step if plan.resume else 0)
            if refusal is not None:
                raise explain(error, restarts, refusal) from error.__cause__
            on_event(
                -1,
                {
                    "kind": "restart",
                    "cause": one_line(error),
                    "from_step": max(newest, 0),
                    "workers": num_workers,
                    "without_progress": restarts.count,
                    "allowed": max_restarts,
                },
            )
        except BaseException as interruption:
            spools.left_behind()
            run.end("failed", repr(interruption))
            raise
        else:
            run.end("finished")
            return results


def _begin(
    run: CheckpointedRun,
    num_workers: int,
    restarted: bool,
    restarts: Restarts,
    patience_seconds: float,
) -> CheckpointPlan:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return run.begin(run.find_start(), num_workers, restarted)
        except StoreError as error:
            if restarts.first_cause is None:
                raise
            if time.monotonic() >= deadline:
                raise explain(restarts.first_cause, restarts, str(error)) from error
        time.sleep(1)


def explain(error: Exception, restarts: Restarts, refusal: str) -> Exception:
    """The first cause since the last progress, and why it is final."""
    cause = restarts.first_cause or error
    if restarts.total and hasattr(cause, "add_note"):
        cause.add_note(f"Given up after {restarts.total} failures: {refusal}.")
    return cause


def launch(
    spark: SparkSession,
    body: Body,
    options: Options,
    data: DataFrame | RDD[Any] | None = None,
    feed: FeedPlan | None = None,
    on_event: OnEvent = lambda rank, message: None,
    run: CheckpointedRun | None = None,
    roles_of: RolesOf | None = None,
    make_service: Callable[[int], DriverService | None] = lambda num_workers: None,
    merge: Merge | None = None,
) -> list[Any]:
    """Check everything that can be checked, then run `body` in every task of every role.

    `roles_of` and `make_service` get the number of workers; `merge` adds up results, on executors
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
            body=body,
            roles=roles_of(count),
            options=options,
            data=data,
            feed=feed,
            on_event=on_event,
            run=run,
            checkpoint=checkpoint,
            spools=spools,
            driver_service=make_service(count),
            merge=merge,
        ).wait()

    if run is None:
        return submit(first_count)
    assert spools is not None
    try:
        return recover(
            run,
            submit,
            count_workers=count_workers,
            max_restarts=options.max_restarts,
            on_event=on_event,
            spools=spools,
            patience_seconds=options.replacement_seconds,
        )
    finally:
        spools.remove_left(spark, cluster.shares_disks)


def _workers_alone(reads: Literal["none", "shards"], num_workers: int) -> list[Role]:
    return [Role("worker", num_workers, reads=reads)]
