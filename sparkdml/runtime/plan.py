"""The plan: the one frozen thing that is shipped to executors, built field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.stores.relay import RelayPlace
from sparkdml.feed.feed import FeedPlan
from sparkdml.runtime.spools import KeptSpool


@dataclass(frozen=True)
class Resources:
    """What each task of a role needs."""

    cpus: int = 1  # torch threads, and slots where the cluster can give several to a task
    gpus: int = 0


@dataclass(frozen=True)
class Role:
    """A kind of task that the driver must launch, and how many of them."""

    name: str
    count: int
    gang: bool = True  # a barrier job, or ordinary tasks that Spark retries one by one
    reads: Literal["shards", "leases", "replica", "none"] = "shards"
    resources: Resources | None = None


@dataclass(frozen=True)
class Options:
    """How a run is to be carried out, whatever it computes."""

    num_workers: int | None = None  # None: as many as there are slots
    resources: Resources = Resources()
    backend: str = "auto"
    seed: int = 0
    slot_timeout: float = 60.0
    max_restarts: int = 3  # without a new checkpoint in between
    min_workers: int = 1  # to go on with after a failure
    replacement_seconds: float = 60.0  # to wait for an executor in place of a lost one
    heartbeat_timeout: float = 8.0
    name: str = "sparkdml"
    timeline: bool = False  # whether workers record spans
    forwards_output: bool = False  # whether what workers print and log is shown at the driver
    keeps_on_interrupt: bool = False  # whether Ctrl-C asks the workers to end in good order


@dataclass(frozen=True)
class Plan:
    """Everything that a worker must know before it speaks to anybody."""

    run_id: str
    role: Role
    resources: Resources
    driver_host: str
    driver_port: int  # the endpoint: liveness, events, failures
    store_port: int
    kv_port: int
    token: str
    backend: str
    seed: int
    source: Literal["arrow", "rows", "none"]
    feed: FeedPlan | None
    checkpoint: CheckpointPlan | None = None
    spools: Mapping[int, KeptSpool] = field(default_factory=dict)  # by rank, of an earlier attempt
    stale_spools: tuple[str, ...] = ()  # of earlier attempts, to be removed where they are found
    heartbeat_seconds: float = 1.0
    timeline: bool = False  # whether to record spans
    forwards_output: bool = False
    depot: RelayPlace | None = None  # where what is large is fetched and left; None: by Spark
    cargo_bytes: int = 0  # from how many bytes on something is large
    counts_rows: bool = False  # whether workers must look at all rows first, as Spark can't tell
