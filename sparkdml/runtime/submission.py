"""One submission of a run: its job, its endpoint, its rendezvous, and a watch on them.

The job runs on a thread of its own and in a job group of its own, so that the caller's thread can
watch the workers, show progress, and cancel on Ctrl-C or on the first failure.
"""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.run import CheckpointedRun
from sparkdml.comm.backends import resolve_backend
from sparkdml.comm.rendezvous import Rendezvous
from sparkdml.errors import DataError
from sparkdml.feed.feed import FeedPlan
from sparkdml.runtime.cargo.depot import Depot
from sparkdml.runtime.cluster import Cluster
from sparkdml.runtime.context import NO_ROWS
from sparkdml.runtime.endpoint import GRACE_FOR_THE_CAUSE_SECONDS, Endpoint
from sparkdml.runtime.interrupts import Interrupts
from sparkdml.runtime.jobs import Job, Parts, is_rdd, make_job
from sparkdml.runtime.plan import Options, Plan, Role
from sparkdml.runtime.preflight import cargo_threshold
from sparkdml.runtime.restarts import describe_failure
from sparkdml.runtime.spark_errors import explain_spark_error
from sparkdml.runtime.spools import Spools
from sparkdml.runtime.wire import Message
from sparkdml.runtime.worker import Body

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame, SparkSession

WATCH_SECONDS = 0.05
LEAVE_SECONDS = 15.0  # Spark kills a task's Python process 2 s after the task was cancelled

OnEvent = Callable[[int, Message], None]


class Submission:
    """Made, then waited for once."""

    def __init__(
        self,
        spark: SparkSession,
        cluster: Cluster,
        body: Body,
        role: Role,
        options: Options,
        data: DataFrame | RDD[Any] | None,
        feed: FeedPlan | None,
        profile: ResourceProfile | None,
        on_event: OnEvent,
        run: CheckpointedRun | None = None,
        checkpoint: CheckpointPlan | None = None,
        spools: Spools | None = None,
    ) -> None:
        self._run, self._spools = run, spools
        kept = {} if spools is None else spools.usable(role.count)
        if len(kept) == role.count:
            data = None  # everything is on the workers' disks
        self._count, self._on_event = role.count, on_event
        self._cluster = cluster
        self._options = options
        self._group = f"sparkdml-{uuid.uuid4()}"
        self._parts: Parts = []
        self._num_rows: dict[int, int] = {}
        self._spark_error: Exception | None = None
        backend = resolve_backend(options.backend, role.count)
        host = cluster.driver_host()
        token = secrets.token_urlsafe(32)
        self._rendezvous = Rendezvous(host)
        self._endpoint = Endpoint(host, token, options.heartbeat_timeout, self._event, self._answer)
        cargo_bytes = cargo_threshold(cluster.setting)
        self._depot = None if cargo_bytes is None else Depot(host, cargo_bytes)
        plan = Plan(
            run_id=self._group,
            role=role,
            resources=options.resources,
            driver_host=host,
            driver_port=self._endpoint.port,
            store_port=self._rendezvous.store_port,
            kv_port=self._rendezvous.kv_port,
            token=token,
            backend=backend,
            seed=options.seed,
            source="none" if data is None else ("rows" if is_rdd(data) else "arrow"),
            feed=feed,
            checkpoint=checkpoint,
            forwards_output=options.forwards_output,
            spools=kept,
            stale_spools=() if spools is None else spools.stale(),
            heartbeat_seconds=min(1.0, options.heartbeat_timeout / 4),
            timeline=options.timeline,
            depot=None if self._depot is None else self._depot.place,
            cargo_bytes=cargo_bytes or 0,
            counts_rows=data is not None and not is_rdd(data) and not cluster.tells_facts,
        )
        try:
            if self._depot is not None:
                body = self._depot.consign(body)
            self._job: Job = make_job(spark, data, plan, body, profile)
        except BaseException:
            self._close()
            raise

    def wait(self) -> list[Any]:
        """Submit and watch; the workers' results in rank order, or the first cause of a failure."""
        thread = self._cluster.thread(self._submit, self._group, self._options.name)
        thread.start()
        try:
            with Interrupts(self._options.keeps_on_interrupt) as interrupts:
                self._watch(thread, interrupts)
            results = join_parts(self._parts)
            if not results:
                raise DataError(NO_ROWS)  # Spark runs no task at all over what it knows is empty
            return results if self._depot is None else [self._depot.collect(r) for r in results]
        except BaseException as error:
            self._on_event(-1, describe_failure(error))
            self._cancel(thread)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        self._endpoint.close()
        self._rendezvous.close()
        if self._depot is not None:
            self._depot.close()

    def _submit(self) -> None:
        try:
            self._parts = self._job.collect()
        except Exception as error:
            self._spark_error = error

    def _watch(self, thread: threading.Thread, interrupts: Interrupts) -> None:
        while thread.is_alive():
            thread.join(WATCH_SECONDS)
            if interrupts.take() and not self._endpoint.request_stop("interrupted"):
                raise KeyboardInterrupt  # no worker is there yet, so there is nothing to keep
            failure = self._endpoint.failure()
            if failure is not None and thread.is_alive():
                raise failure
        if self._endpoint.own_error is not None:
            raise self._endpoint.own_error
        if self._spark_error is not None:
            failure = self._wait_for_the_cause()
            if failure is not None:
                raise failure  # the workers' own words; Spark's would be a page of Java
            raise explain_spark_error(self._spark_error, self._cluster.worker_python)

    def _wait_for_the_cause(self) -> Exception | None:
        """Why the workers say that the job failed; they may say so a moment later."""
        deadline = time.monotonic() + GRACE_FOR_THE_CAUSE_SECONDS + 0.5
        while self._endpoint.members and time.monotonic() < deadline:
            failure = self._endpoint.failure()
            if failure is not None:
                return failure
            time.sleep(WATCH_SECONDS)
        return None

    def _cancel(self, thread: threading.Thread) -> None:
        """End the job and wait until its processes are gone."""
        self._endpoint.stop_all()
        self._rendezvous.sound_alarm("the driver has ended the run")  # wakes ranks in a collective
        self._cluster.cancel(self._group)
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and (thread.is_alive() or not self._endpoint.all_gone()):
            time.sleep(WATCH_SECONDS)

    def _event(self, rank: int, message: Message) -> None:
        if message.get("kind") == "spooled" and self._spools is not None:
            self._spools.note(rank, message, self._count)
        else:
            self._on_event(rank, message)

    def _answer(self, rank: int, message: Message) -> Any:
        if message.get("what") == "clock":
            return time.time()  # for the timeline, whose ranks all go by the driver's clock
        if message.get("what") == "facts":
            return self._facts()
        if message.get("what") == "rows":
            return self._check_rows(rank, int(message["num_rows"]))
        if message.get("what") == "spool-lost" and self._spools is not None:
            return self._spools.lost(rank)
        return None if self._run is None else self._run.answer(rank, message)

    def _check_rows(self, rank: int, num_rows: int) -> None:
        """Where Spark can't tell how many rows there are, the workers do."""
        self._num_rows[rank] = num_rows
        if len(self._num_rows) == self._count and not any(self._num_rows.values()):
            raise DataError(NO_ROWS)

    def _facts(self) -> Message | None:
        facts = self._job.facts()
        if facts is None:
            return None if self._spools is None else self._spools.facts
        known: Message = {**asdict(facts), "problem": facts.problem(), "refusal": None}
        if self._run is not None:
            known["refusal"] = self._run.check_data(known)
        if self._spools is not None:
            self._spools.facts = known
        return known


def join_parts(parts: Parts) -> list[Any]:
    """Every rank's result, put together from its pieces, which came by Spark's own channel."""
    from pyspark import cloudpickle

    payloads: dict[int, list[bytes]] = {}
    for rank, _, payload in sorted(parts, key=lambda part: part[:2]):
        payloads.setdefault(rank, []).append(payload)
    return [cloudpickle.loads(b"".join(payloads[rank])) for rank in sorted(payloads)]
