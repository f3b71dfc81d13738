"""A run, and one submission of it, as the driver knows them: two frozen values.

`dml.run` and a fit make a `LaunchRequest`, which `launch` carries out. For each submission `launch`
derives a `SubmissionContext` from it. Neither value owns anything that must be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.comm.backends import resolve_backend
from sparkdml.feed.feed import FeedPlan
from sparkdml.network.connection import Message
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun
from sparkdml.runtime.driver.cluster import Cluster
from sparkdml.runtime.driver.preflight import blob_threshold, must_encrypt_wires
from sparkdml.runtime.driver.spools import Spools
from sparkdml.runtime.protocol.kept_spools import KeptSpool
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.results import Merge
from sparkdml.runtime.protocol.roles import Role, RolesOf, job_roles, num_tasks
from sparkdml.runtime.protocol.service import DriverService, SharedService, TimedService
from sparkdml.runtime.worker.main import Body

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

OnEvent = Callable[[int, Message], None]
MakeService = Callable[[int], DriverService | None]  # of the number of workers


def ignore_event(rank: int, message: Message) -> None:
    """For a run that has no observers."""


def no_service(num_workers: int) -> None:
    """For a run whose tasks have nothing to ask the driver."""


@dataclass(frozen=True)
class LaunchRequest:
    """A run: `body` in every task of every role."""

    spark: SparkSession
    body: Body
    options: Options
    data: DataFrame | RDD[Any] | None = None
    feed: FeedPlan | None = None
    on_event: OnEvent = ignore_event
    run: CheckpointedRun | None = None  # with it, a run that fails resumes from its checkpoints
    roles_of: RolesOf | None = None  # None: workers alone
    make_service: MakeService = no_service
    merge: Merge | None = None  # adds up results, on executors where they are many

    def roles(self, num_workers: int) -> Sequence[Role]:
        if self.roles_of is not None:
            return self.roles_of(num_workers)
        return [Role("worker", num_workers, reads="none" if self.data is None else "shards")]


@dataclass(frozen=True)
class SubmissionContext:
    """One submission, before its servers are open and its jobs are made."""

    request: LaunchRequest
    cluster: Cluster
    jobs: tuple[tuple[Role, ...], ...]  # the roles of each Spark job; first the job that trains
    checkpoint: CheckpointPlan | None
    spools: Spools | None  # None: a restarted task gets its rows from Spark
    kept_spools: Mapping[int, KeptSpool]  # by rank
    driver_service: DriverService | None
    blob_bytes: int | None  # None: Spark's settings ask for encryption, so blobs go by Spark only
    must_encrypt: bool  # on the wires

    @property
    def leader(self) -> Role:
        """The role that trains."""
        return self.jobs[0][0]

    @property
    def backend(self) -> str | None:
        """What the workers' communicator is opened with; None if they need none."""
        if not self.leader.gang:
            return None
        return resolve_backend(self.request.options.backend, num_tasks(self.jobs[0]))

    @property
    def data(self) -> DataFrame | RDD[Any] | None:
        """None if all rows are on the workers' disks already."""
        return None if len(self.kept_spools) == self.leader.count else self.request.data

    @property
    def shared_service(self) -> SharedService | None:
        service = self.driver_service
        return service if isinstance(service, SharedService) else None


def begin_submission(
    request: LaunchRequest,
    cluster: Cluster,
    num_workers: int,
    *,
    checkpoint: CheckpointPlan | None = None,
    spools: Spools | None = None,
) -> SubmissionContext:
    jobs = tuple(job_roles(request.roles(num_workers)))
    leader = jobs[0][0]
    service = request.make_service(num_workers)
    if isinstance(service, TimedService):
        service.use_timeouts(request.options.timeouts)
    return SubmissionContext(
        request,
        cluster,
        jobs=jobs,
        checkpoint=checkpoint,
        spools=spools,
        kept_spools={} if spools is None else spools.usable(leader.count),
        driver_service=service,
        blob_bytes=blob_threshold(cluster.setting),
        must_encrypt=must_encrypt_wires(cluster.setting),
    )
