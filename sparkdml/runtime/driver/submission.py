"""One submission of a run: the servers that its tasks talk to, its Spark jobs, and a watch on them.

Runs at the driver. The caller's thread watches; each job runs on a thread and in a job group of its
own, so that the caller can show progress and cancel all jobs on Ctrl-C or when one of them fails.
The servers live as long as the submission.

While a run is watched, the first Ctrl-C asks for an early end, and the second is an exception. Only
the driver's main thread gets signals. Spark's own handler of the signal cancels all jobs before
Python sees it, and there would be no model left to keep: it is put aside until the second Ctrl-C.
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from sparkdml.comm.backends import resolve_backend
from sparkdml.comm.rendezvous import Rendezvous
from sparkdml.errors import DataError, WorkerLost
from sparkdml.feed.sharding import DataFacts
from sparkdml.network.timeouts import TASKS_LEAVE_SECONDS
from sparkdml.runtime.driver.blob_server import BlobServer
from sparkdml.runtime.driver.control_server import ControlServer
from sparkdml.runtime.driver.dispatcher import Dispatcher
from sparkdml.runtime.driver.failures import (
    describe_failure,
    ended_by_spark,
    explain_spark_error,
    with_spark_report,
)
from sparkdml.runtime.driver.jobs import RoleJob, is_rdd, make_job
from sparkdml.runtime.driver.request import SubmissionContext
from sparkdml.runtime.protocol.plan import Plan
from sparkdml.runtime.protocol.results import join_pieces
from sparkdml.runtime.protocol.roles import Role, num_tasks
from sparkdml.runtime.worker.context import NO_ROWS


class Interrupts:
    """Installs the handler for the length of a `with` block; on other threads it does nothing."""

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
            "\nStopping after this step and keeping the model trained so far. Press Ctrl-C again "
            "to stop at once and discard it.",
            file=sys.stderr,
            flush=True,
        )


WATCH_SECONDS = 0.05  # between two looks at the jobs and their tasks
SPARK_REPORT_SECONDS = 0.5  # for Spark's own report of a process that is gone; often much sooner


@dataclass(frozen=True)
class Servers:
    """What the tasks of a submission connect to at the driver."""

    host: str
    token: str
    control: ControlServer
    rendezvous: Rendezvous
    blobs: BlobServer | None


@contextmanager
def open_servers(context: SubmissionContext, dispatcher: Dispatcher) -> Iterator[Servers]:
    """Closed at the end of the block, in the reverse order, and with them a shared service."""
    options = context.request.options
    host, token = context.cluster.driver_host(), secrets.token_urlsafe(32)
    one_by_one = [role for job in context.jobs for role in job if not role.gang]
    with ExitStack() as opened:
        if context.shared_service is not None:
            opened.callback(context.shared_service.close)
        blobs = None
        if context.blob_bytes is not None:
            blobs = BlobServer(host, context.blob_bytes, options.timeouts)
            opened.enter_context(closing(blobs))
        rendezvous = opened.enter_context(closing(Rendezvous(host)))
        rendezvous.serve(options.backend)
        control = ControlServer(
            host,
            token,
            timeouts=options.timeouts,
            on_event=dispatcher.event,
            answer=dispatcher.answer,
            retried=[role.name for role in one_by_one],
            on_change=dispatcher.change,
            together=[role.name for role in one_by_one if role.at_once],
        )
        opened.enter_context(closing(control))
        yield Servers(host, token, control=control, rendezvous=rendezvous, blobs=blobs)


# -- the plans that are shipped --------------------------------------------------------------------


def plan_jobs(context: SubmissionContext, servers: Servers) -> list[Plan]:
    """The plan of each job's tasks; they are numbered from one job to the next."""
    leader, first_number, plans = plan_leader(context, servers), 0, []
    for job in context.jobs:
        plan = _with_roles(leader, job, context.request.options.backend)
        plans.append(_plan_other(plan, first_number) if first_number else plan)
        first_number += num_tasks(job)
    return plans


def plan_leader(context: SubmissionContext, servers: Servers) -> Plan:
    """What the tasks that train are told; other jobs are told the same, but for what differs."""
    request, options, data = context.request, context.request.options, context.data
    shared = context.shared_service
    return Plan(
        run_id=f"sparkdml-{uuid.uuid4()}",
        role=context.leader,
        resources=options.resources,
        driver_host=servers.host,
        driver_port=servers.control.port,
        store_port=servers.rendezvous.store_port,
        kv_port=servers.rendezvous.kv_port,
        token=servers.token,
        backend="single",
        seed=options.seed,
        source="none" if data is None else ("rows" if is_rdd(data) else "arrow"),
        feed=request.feed,
        checkpoint=context.checkpoint,
        forwards_output=options.forwards_output,
        spools=context.kept_spools,
        stale_spools=() if context.spools is None else context.spools.stale(),
        timeouts=options.timeouts,
        timeline=options.timeline,
        blob_server=None if servers.blobs is None else servers.blobs.place,
        # What is to be merged on executors can't lie at the driver.
        blob_bytes=sys.maxsize if request.merge is not None else context.blob_bytes or 0,
        secret=secrets.token_bytes(32) if shared is None else shared.secret,
        must_encrypt=context.must_encrypt,
        counts_rows=data is not None and not is_rdd(data) and not context.cluster.reports_facts,
    )


def _with_roles(plan: Plan, job: tuple[Role, ...], backend: str) -> Plan:
    role = job[0]
    return replace(
        plan,
        role=role,
        roles=job if len(job) > 1 else (),
        resources=role.resources or plan.resources,
        backend=resolve_backend(backend, num_tasks(job)) if role.gang else "single",
    )


def _plan_other(plan: Plan, first_number: int) -> Plan:
    """For a job that does not train: without the rows, but for those that are held out."""
    plan = replace(plan, first_number=first_number, spools={}, stale_spools=(), counts_rows=False)
    if plan.role.reads == "validation":
        assert plan.source == "arrow", "rows are held out of a DataFrame"
        return plan
    return replace(plan, source="none", feed=None)


# -- submit and watch ------------------------------------------------------------------------------


class Submission:
    """Made, then run once."""

    def __init__(self, context: SubmissionContext) -> None:
        self._context, self._cluster = context, context.cluster
        self._jobs: list[RoleJob] = []

    def run(self) -> list[Any]:
        """Submit and watch; the tasks' results in their order, or the first cause of a failure."""
        dispatcher = Dispatcher(self._context, self._read_facts)
        with open_servers(self._context, dispatcher) as self._servers:
            self._control_server = self._servers.control
            self._jobs = self._make_jobs()
            try:
                return self._submit_and_watch()
            except BaseException as error:
                self._context.request.on_event(-1, describe_failure(error))
                self._cancel()
                raise

    def _make_jobs(self) -> list[RoleJob]:
        request, blobs = self._context.request, self._servers.blobs
        body = request.body if blobs is None else blobs.upload(request.body)
        jobs = []
        for plan in plan_jobs(self._context, self._servers):
            job = make_job(
                request.spark,
                self._context.data if plan.source != "none" else None,
                plan=plan,
                body=body,
                profile=self._cluster.task_profile(plan.resources),
                merge=None if plan.first_number else request.merge,
            )
            jobs.append(RoleJob(self._cluster, job, plan, request.options.name))
        return jobs

    def _read_facts(self) -> DataFacts | None:
        return self._jobs[0].job.facts()

    def _submit_and_watch(self) -> list[Any]:
        for job in (*self._jobs[1:], self._jobs[0]):  # servers start before their clients
            job.start()
        with Interrupts(self._context.request.options.keeps_on_interrupt) as interrupts:
            self._watch(interrupts)
        self._dismiss_others()
        results = join_pieces([piece for job in self._jobs for piece in job.parts]).values()
        if not results:
            raise DataError(NO_ROWS)  # Spark runs no task at all over what it knows is empty
        blobs = self._servers.blobs
        return list(results) if blobs is None else [blobs.collect(result) for result in results]

    def _watch(self, interrupts: Interrupts) -> None:
        """Until the first job, the one that trains, is done."""
        leader = self._jobs[0]
        while leader.is_running:
            leader.join(WATCH_SECONDS)
            if interrupts.take() and not self._control_server.request_stop("interrupted"):
                raise KeyboardInterrupt  # no worker has connected yet: there is no model to keep
            self._restart_silent()
            failure = self._control_server.failure()
            if failure is not None and leader.is_running:
                if not isinstance(failure, WorkerLost):
                    raise failure
                leader.join(SPARK_REPORT_SECONDS)  # which may say how the process ended
                self._check_ended(leader)
                raise with_spark_report(failure, leader.error)
            if any(job.error is not None for job in self._jobs):
                break
        if self._control_server.own_error is not None:
            raise self._control_server.own_error
        for job in self._jobs:
            if job.error is not None:
                self._check_ended(job)
                self._control_server.give_up(job.roles)
                failure = self._wait_for_the_cause()
                if isinstance(failure, WorkerLost):
                    raise with_spark_report(failure, job.error)
                if failure is not None:
                    raise failure  # as the worker reported it; Spark's would be a page of Java
                raise explain_spark_error(job.error, self._cluster.worker_python)

    def _check_ended(self, job: RoleJob) -> None:
        """Raise if the run was cancelled in Spark or Spark is gone: no worker can tell that."""
        ended = None if job.error is None else ended_by_spark(job.error)
        if ended is not None:
            raise ended

    def _restart_silent(self) -> None:
        """Spark does not see that a process is stopped: ended by us, it is started elsewhere."""
        for member in self._control_server.take_silent():
            task = member.task
            if task.task_id is None or not self._cluster.kill_task(task.task_id):
                self._control_server.give_up([task.role])  # it can't be ended: it is lost

    def _wait_for_the_cause(self) -> Exception | None:
        """Why the job failed, as the workers report it, perhaps a moment later than Spark."""
        deadline = time.monotonic() + self._context.request.options.timeouts.cause + 0.5
        while self._control_server.members and time.monotonic() < deadline:
            failure = self._control_server.failure()
            if failure is not None:
                return failure
            time.sleep(WATCH_SECONDS)
        return None

    def _dismiss_others(self) -> None:
        """The training is done: its servers may end, and have some time to do so."""
        others = self._jobs[1:]
        self._control_server.dismiss([name for job in others for name in job.roles])
        deadline = time.monotonic() + TASKS_LEAVE_SECONDS
        for job in others:
            job.join(max(0.0, deadline - time.monotonic()))
            if job.is_running or job.error is not None:
                why = job.error or f"still running after {TASKS_LEAVE_SECONDS:g} s"
                text = str(why).partition("\n")[0]
                warnings.warn(f"{', '.join(job.roles)} did not end cleanly: {text}", stacklevel=2)
                job.cancel()

    def _cancel(self) -> None:
        """End the jobs and wait until their processes are gone."""
        self._control_server.stop_all()
        # Wakes ranks that wait in a collective.
        self._servers.rendezvous.sound_alarm("the driver has ended the run")
        for job in self._jobs:
            job.cancel()
        deadline = time.monotonic() + TASKS_LEAVE_SECONDS
        while time.monotonic() < deadline and (
            any(job.is_running for job in self._jobs) or not self._control_server.all_gone()
        ):
            time.sleep(WATCH_SECONDS)
