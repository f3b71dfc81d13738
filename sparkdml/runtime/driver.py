"""The driver's side of a run: check, launch one Spark job a role, watch, and bring results back.

Each job runs on a thread of its own and in a job group of its own, so that the caller's thread can
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
from sparkdml.errors import SetupError, WorkerError
from sparkdml.feed.feed import FeedPlan
from sparkdml.runtime import preflight
from sparkdml.runtime.endpoint import GRACE_FOR_THE_CAUSE_SECONDS, Endpoint
from sparkdml.runtime.jobs import Job, Parts, is_rdd, make_job
from sparkdml.runtime.plan import Options, Plan, Role
from sparkdml.runtime.recovery import recover
from sparkdml.runtime.restarts import describe_failure
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


class Launch:
    """One submission of a run: its jobs, its endpoint, its rendezvous."""

    def __init__(
        self,
        spark: SparkSession,
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
        self._sc = spark.sparkContext
        self._name = options.name
        self._group = f"sparkdml-{uuid.uuid4()}"
        self._parts: Parts = []
        self._spark_error: Exception | None = None
        backend = resolve_backend(options.backend, role.count)
        host = preflight.driver_host(self._sc)
        token = secrets.token_urlsafe(32)
        self._rendezvous = Rendezvous(host)
        self._endpoint = Endpoint(host, token, options.heartbeat_timeout, self._event, self._answer)
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
        )
        try:
            self._job: Job = make_job(spark, data, plan, body, profile)
        except BaseException:
            self._close()
            raise

    def wait(self) -> list[Any]:
        """Submit and watch; the workers' results in rank order, or the first cause of a failure."""
        from pyspark import InheritableThread

        thread = InheritableThread(target=self._submit, name=self._group)
        thread.daemon = True
        thread.start()
        try:
            self._watch(thread)
        except BaseException as error:
            self._on_event(-1, describe_failure(error))
            self._cancel(thread)
            raise
        finally:
            self._close()
        return join_parts(self._parts)

    def _close(self) -> None:
        self._endpoint.close()
        self._rendezvous.close()

    def _submit(self) -> None:
        try:
            self._sc.setJobGroup(self._group, self._name, interruptOnCancel=True)
            self._parts = self._job.collect()
        except Exception as error:
            self._spark_error = error

    def _watch(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            thread.join(WATCH_SECONDS)
            failure = self._endpoint.failure()
            if failure is not None and thread.is_alive():
                raise failure
        if self._spark_error is not None:
            failure = self._wait_for_the_cause()
            if failure is not None:
                raise failure  # the workers' own words; Spark's would be a page of Java
            raise explain_spark_error(self._spark_error, self._sc.pythonExec)

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
        self._sc.cancelJobGroup(self._group)
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
        if message.get("what") == "spool-lost" and self._spools is not None:
            return self._spools.lost(rank)
        return None if self._run is None else self._run.answer(rank, message)

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


def explain_spark_error(error: Exception, worker_python: str) -> Exception:
    """A failure of which no worker could speak: it never came as far as our code."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException | Py4JError):
        return error  # at the driver itself: a function that can't be pickled, for instance
    text = str(error)
    explained: Exception = WorkerError(-1, "an unknown host", f"Spark ended the job: {text}")
    for line in text.splitlines():
        if "ModuleNotFoundError" in line or "PYTHON_VERSION_MISMATCH" in line:
            explained = SetupError(
                f"the workers' Python ({worker_python}) can't run the job: {line.strip()}. Set "
                "PYSPARK_PYTHON to a Python that has the driver's version, torch, pyarrow and "
                "sparkdml on every host, or ship them with --py-files or --archives"
            )
            break
    explained.__cause__ = error
    return explained


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
    sc = spark.sparkContext
    many = options.num_workers is None or options.num_workers > 1
    preflight.check_settings(dict(sc.getConf().getAll()), many=many, spools=data is not None)
    preflight.check_worker_python(sc)
    profile = preflight.task_profile(sc, options.resources)

    first_count = preflight.wait_for_slots(
        sc, options.num_workers, options.resources, profile, options.slot_timeout
    )

    def count_workers(restarted: bool) -> int:
        if not restarted:
            return first_count
        return preflight.wait_for_replacements(
            sc,
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
        return Launch(
            spark, body, role, options, data, feed, profile, on_event, run, checkpoint, spools
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
