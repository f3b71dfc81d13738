"""One submission of a run: its jobs, their endpoint, their rendezvous, and a watch on them.

Each job runs on a thread and in a job group of its own, so that the caller's thread can watch the
workers, show progress, and cancel all jobs on Ctrl-C or when one of them has failed.

One Spark job of a run, on a thread and in a job group of its own.

Ctrl-C as a wish: the first is noted for whoever watches the run, the second is an exception.

Spark's own handler of the signal cancels all jobs before Python hears of it, so that there would be
nothing left to keep: it stands aside until the second.
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.comm.backends import resolve_backend
from sparkdml.comm.rendezvous import Rendezvous
from sparkdml.errors import DataError
from sparkdml.feed.feed import FeedPlan
from sparkdml.runtime.driver.blob_server import BlobServer
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun
from sparkdml.runtime.driver.cluster import Cluster
from sparkdml.runtime.driver.control_server import GRACE_FOR_THE_CAUSE_SECONDS, ControlServer
from sparkdml.runtime.driver.dispatcher import Dispatcher, OnEvent
from sparkdml.runtime.driver.failures import describe_failure, explain_spark_error
from sparkdml.runtime.driver.jobs import Job, Parts, is_rdd, make_job
from sparkdml.runtime.driver.preflight import blob_threshold
from sparkdml.runtime.driver.spools import Spools
from sparkdml.runtime.protocol.plan import Options, Plan
from sparkdml.runtime.protocol.results import Merge, join_pieces
from sparkdml.runtime.protocol.roles import Role, job_roles, num_tasks
from sparkdml.runtime.protocol.service import DriverService, SharedService
from sparkdml.runtime.worker.context import NO_ROWS
from sparkdml.runtime.worker.main import Body

if TYPE_CHECKING:
    import threading

    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession


class RoleJob:
    """Started once; then it runs until Spark has ended it, well or not."""

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
        self._cluster.cancel(self._group)

    def _submit(self) -> None:
        try:
            self.parts = self.job.collect()
        except Exception as error:
            self.error = error


class Interrupts:
    """Inside of the block, and only on the main thread, which alone gets signals."""

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps and threading.current_thread() is threading.main_thread()
        self._noted = False
        self._before: Any = None

    def take(self) -> bool:
        """Whether there was a Ctrl-C since the last call."""
        noted, self._noted = self._noted, False
        return noted

    def __enter__(self) -> Interrupts:
        if self._keeps:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._keeps:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No locks and no sockets in here: the watching thread is the one that was interrupted.
        self._noted = True
        signal.signal(signal.SIGINT, self._before)
        print(
            "\nstopping after this step; the model so far is kept. Ctrl-C again to give it up",
            file=sys.stderr,
            flush=True,
        )


WATCH_SECONDS = 0.05
LEAVE_SECONDS = 15.0  # Spark kills a task's Python process 2 s after the task was cancelled


class Submission:
    """Made, then waited for once."""

    def __init__(
        self,
        spark: SparkSession,
        cluster: Cluster,
        body: Body,
        roles: Sequence[Role],
        options: Options,
        data: DataFrame | RDD[Any] | None,
        feed: FeedPlan | None,
        on_event: OnEvent,
        run: CheckpointedRun | None = None,
        checkpoint: CheckpointPlan | None = None,
        spools: Spools | None = None,
        driver_service: DriverService | None = None,
        merge: Merge | None = None,
    ) -> None:
        jobs = job_roles(roles)
        leader = jobs[0][0]
        if not leader.gang:
            spools = None  # a task that comes back gets its rows from Spark again
        kept = {} if spools is None else spools.usable(leader.count)
        if len(kept) == leader.count:
            data = None  # everything is on the workers' disks
        self._on_event, self._cluster, self._options = on_event, cluster, options
        self._jobs: list[RoleJob] = []
        self._guest = driver_service if isinstance(driver_service, SharedService) else None
        dispatcher = Dispatcher(
            jobs,
            on_event,
            read_facts=lambda: self._jobs[0].job.facts(),
            run=run,
            spools=spools,
            driver_service=driver_service,
        )
        host = cluster.driver_host()
        token = secrets.token_urlsafe(32)
        self._rendezvous = Rendezvous(host)
        self._rendezvous.serve(options.backend)
        retried = [role.name for role in roles if not role.gang]
        self._control_server = ControlServer(
            host,
            token,
            beat_timeout_seconds=options.heartbeat_timeout,
            on_event=dispatcher.event,
            answer=dispatcher.answer,
            retried=retried,
            on_change=dispatcher.change,
            together=[role.name for role in roles if not role.gang and role.at_once],
        )
        blob_bytes = blob_threshold(cluster.setting)
        self._blob_server = None if blob_bytes is None else BlobServer(host, blob_bytes)
        first = Plan(
            run_id=f"sparkdml-{uuid.uuid4()}",
            role=leader,
            resources=options.resources,
            driver_host=host,
            driver_port=self._control_server.port,
            store_port=self._rendezvous.store_port,
            kv_port=self._rendezvous.kv_port,
            token=token,
            backend="single",
            seed=options.seed,
            source="none" if data is None else ("rows" if is_rdd(data) else "arrow"),
            feed=feed,
            checkpoint=checkpoint,
            forwards_output=options.forwards_output,
            spools=kept,
            stale_spools=() if spools is None else spools.stale(),
            heartbeat_seconds=min(1.0, options.heartbeat_timeout / 4),
            timeline=options.timeline,
            blob_server=None if self._blob_server is None else self._blob_server.place,
            # What is to be merged on executors can't lie at the driver.
            blob_bytes=sys.maxsize if merge is not None else blob_bytes or 0,
            secret=secrets.token_bytes(32) if self._guest is None else self._guest.secret,
            must_encrypt=blob_bytes is None,
            counts_rows=data is not None and not is_rdd(data) and not cluster.reports_facts,
        )
        try:
            if self._blob_server is not None:
                body = self._blob_server.upload(body)
            for job in jobs:
                plan = self._plan_of(job, first)
                profile = cluster.task_profile(plan.resources)
                source = data if plan.source != "none" else None
                made = make_job(
                    spark,
                    source,
                    plan=plan,
                    body=body,
                    profile=profile,
                    merge=None if plan.first_number else merge,
                )
                self._jobs.append(RoleJob(cluster, made, plan, options.name))
        except BaseException:
            self._close()
            raise

    def _plan_of(self, job: tuple[Role, ...], first: Plan) -> Plan:
        """What the tasks of one job are told, where it differs from the first job's."""
        role = job[0]
        backend = resolve_backend(self._options.backend, num_tasks(job)) if role.gang else "single"
        plan = replace(
            first,
            role=role,
            roles=job if len(job) > 1 else (),
            resources=role.resources or self._options.resources,
            backend=backend,
            first_number=sum(num_tasks(other.plan.job_roles) for other in self._jobs),
        )
        if not plan.first_number:
            return plan
        plan = replace(plan, spools={}, stale_spools=(), counts_rows=False)
        if role.reads == "validation":
            assert plan.source == "arrow", "rows are held out of a DataFrame"
            return plan
        return replace(plan, source="none", feed=None)

    def wait(self) -> list[Any]:
        """Submit and watch; the tasks' results in their order, or the first cause of a failure."""
        try:
            for job in (*self._jobs[1:], self._jobs[0]):  # who serves comes before who is served
                job.start()
            with Interrupts(self._options.keeps_on_interrupt) as interrupts:
                self._watch(interrupts)
            self._dismiss_others()
            pieces = [piece for job in self._jobs for piece in job.parts]
            results = list(join_pieces(pieces).values())
            if not results:
                raise DataError(NO_ROWS)  # Spark runs no task at all over what it knows is empty
            return (
                results
                if self._blob_server is None
                else [self._blob_server.collect(r) for r in results]
            )
        except BaseException as error:
            self._on_event(-1, describe_failure(error))
            self._cancel()
            raise
        finally:
            self._close()

    def _close(self) -> None:
        self._control_server.close()
        self._rendezvous.close()
        if self._blob_server is not None:
            self._blob_server.close()
        if self._guest is not None:
            self._guest.close()

    def _watch(self, interrupts: Interrupts) -> None:
        """Until the first job, the one that trains, is done."""
        leader = self._jobs[0]
        while leader.is_running:
            leader.join(WATCH_SECONDS)
            if interrupts.take() and not self._control_server.request_stop("interrupted"):
                raise KeyboardInterrupt  # no worker is there yet, so there is nothing to keep
            self._restart_silent()
            failure = self._control_server.failure()
            if failure is not None and leader.is_running:
                raise failure
            if any(job.error is not None for job in self._jobs):
                break
        if self._control_server.own_error is not None:
            raise self._control_server.own_error
        for job in self._jobs:
            if job.error is not None:
                self._control_server.give_up(job.roles)
                failure = self._wait_for_the_cause()
                if failure is not None:
                    raise failure  # the workers' own words; Spark's would be a page of Java
                raise explain_spark_error(job.error, self._cluster.worker_python)

    def _restart_silent(self) -> None:
        """Spark does not see that a process is stopped: ended by us, it is started elsewhere."""
        for member in self._control_server.take_silent():
            if member.task_id is None or not self._cluster.kill_task(member.task_id):
                self._control_server.give_up([member.role])  # nobody else can end it: it is a loss

    def _wait_for_the_cause(self) -> Exception | None:
        """Why the workers say that the job failed; they may say so a moment later."""
        deadline = time.monotonic() + GRACE_FOR_THE_CAUSE_SECONDS + 0.5
        while self._control_server.members and time.monotonic() < deadline:
            failure = self._control_server.failure()
            if failure is not None:
                return failure
            time.sleep(WATCH_SECONDS)
        return None

    def _dismiss_others(self) -> None:
        """The training is done: who served it may go, and has some time to do so."""
        others = self._jobs[1:]
        self._control_server.dismiss([name for job in others for name in job.roles])
        deadline = time.monotonic() + LEAVE_SECONDS
        for job in others:
            job.join(max(0.0, deadline - time.monotonic()))
            if job.is_running or job.error is not None:
                why = job.error or f"still running after {LEAVE_SECONDS:g} s"
                text = str(why).partition("\n")[0]
                warnings.warn(f"{', '.join(job.roles)} did not end well: {text}", stacklevel=2)
                job.cancel()

    def _cancel(self) -> None:
        """End the jobs and wait until their processes are gone."""
        self._control_server.stop_all()
        self._rendezvous.sound_alarm("the driver has ended the run")  # wakes ranks in a collective
        for job in self._jobs:
            job.cancel()
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and (
            any(job.is_running for job in self._jobs) or not self._control_server.all_gone()
        ):
            time.sleep(WATCH_SECONDS)
