"""The plan: the one frozen thing that is shipped to executors, built field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparkdml.feed.feed import FeedPlan


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
    heartbeat_timeout: float = 8.0
    name: str = "sparkdml"


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
    generation: int = 0  # how often this run was started again
    heartbeat_seconds: float = 1.0
