"""A run's options, and the plan: the one frozen value that is shipped to executors.

The driver builds the plan field by field; a task reads it. Neither has any behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.stores.relay import RelayPlace
from sparkdml.errors import check_seconds, check_whole
from sparkdml.feed.feed import FeedPlan
from sparkdml.network.timeouts import HEARTBEAT_TIMEOUT, Timeouts
from sparkdml.runtime.protocol.kept_spools import KeptSpool
from sparkdml.runtime.protocol.roles import Resources as Resources
from sparkdml.runtime.protocol.roles import Role as Role


@dataclass(frozen=True)
class Options:
    """How a run is to be carried out, whatever it computes."""

    num_workers: int | None = None  # None: as many as there are slots
    resources: Resources = field(default_factory=Resources)
    backend: str = "auto"
    seed: int = 0
    slot_timeout: float = 60.0
    max_restarts: int = 3  # without a new checkpoint in between
    min_workers: int = 1  # to continue with after a failure
    replacement_seconds: float = 60.0  # to wait for an executor to replace a lost one
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT
    name: str = "sparkdml"
    timeline: bool = False  # whether workers record spans
    forwards_output: bool = False  # whether what workers print and log is shown at the driver
    keeps_on_interrupt: bool = False  # whether Ctrl-C asks the workers to stop after their step

    def __post_init__(self) -> None:
        check_seconds("slot_timeout", self.slot_timeout, or_zero=True)
        check_whole("max_restarts", self.max_restarts, 0)
        check_whole("min_workers", self.min_workers, 1)
        check_seconds("replacement_seconds", self.replacement_seconds, or_zero=True)
        check_seconds("heartbeat_timeout", self.heartbeat_timeout)

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.heartbeat_timeout)


@dataclass(frozen=True)
class Plan:
    """Everything that a task must know before it connects to anything."""

    run_id: str
    role: Role  # in a job of several roles the first, until each task has found its own
    resources: Resources
    driver_host: str
    driver_port: int  # of the control server: liveness, events, failures
    store_port: int
    kv_port: int
    token: str
    backend: str
    seed: int
    source: Literal["arrow", "rows", "none"]
    feed: FeedPlan | None
    checkpoint: CheckpointPlan | None = None
    roles: tuple[Role, ...] = ()  # all that this job has, if they are several
    first_number: int = 0  # of this job's tasks among all of the run
    secret: bytes = field(default=b"", repr=False)  # of the run: sent by Spark's own channel only
    must_encrypt: bool = False  # whether Spark's settings ask for it
    spools: Mapping[int, KeptSpool] = field(default_factory=dict)  # by rank, of an earlier attempt
    stale_spools: tuple[str, ...] = ()  # of earlier attempts, to be removed where they are found
    timeouts: Timeouts = field(default_factory=Timeouts)  # from heartbeatTimeout
    timeline: bool = False  # whether to record spans
    forwards_output: bool = False
    blob_server: RelayPlace | None = None  # None: everything goes by Spark
    blob_bytes: int = 0  # larger objects go by the blob server
    counts_rows: bool = False  # whether workers must look at all rows first, as Spark can't tell

    @property
    def job_roles(self) -> tuple[Role, ...]:
        return self.roles or (self.role,)

    @property
    def is_training_role(self) -> bool:
        """Whether this role is the one that trains: its rank 0 is number 0 of the run."""
        return not self.first_number and self.role == self.job_roles[0]
