"""The configuration that all members of a server group share: shipped to servers and workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkdml.errors import ParameterError
from sparkdml.network.timeouts import SERVER_BEAT_SECONDS, SERVER_REQUEST_SECONDS, Timeouts
from sparkdml.parameter_server.consistency import ASP, BSP, Consistency, Expulsion
from sparkdml.parameter_server.filters import Filter
from sparkdml.parameter_server.partition import PART_BYTES
from sparkdml.parameter_server.wire.seal import JobKey


@dataclass(frozen=True)
class ServerConfig:
    """
    Args:
        key: the job's key, which also says whether messages are encrypted.
        num_servers: how many serve at first; the group begins when all of them have joined.
        num_workers: how many workers to wait for before the first one's constructor returns.
        consistency: how far workers may run apart.
        replication: how many servers hold each part; with one server there is nowhere to replicate.
        part_bytes: how large a part of a table is.
        finite_only: drop pushes with NaN or infinity in them, and count them.
        filter: decides which part of an update is sent now; the rest is held back and added up.
        half: send pushes and pulls of floats in half precision.
        expulsion: the rule by which a worker that is too slow is no longer waited for.
        beat_seconds: the interval of members' heartbeats.
        lost_after_seconds: the silence after which a member counts as dead; in a run, it follows
            from heartbeatTimeout.
        timeout_seconds: how long a worker tries before it gives up.
    """

    key: JobKey = field(repr=False)
    num_servers: int = 1
    num_workers: int = 1
    consistency: Consistency = field(default_factory=BSP)
    replication: int = 2
    part_bytes: int = PART_BYTES
    finite_only: bool = False
    filter: Filter | None = None
    half: bool = False
    expulsion: Expulsion | None = None
    beat_seconds: float = SERVER_BEAT_SECONDS
    lost_after_seconds: float = Timeouts().server_lost
    timeout_seconds: float = SERVER_REQUEST_SECONDS

    def __post_init__(self) -> None:
        for name in ("num_servers", "num_workers", "replication", "part_bytes"):
            if getattr(self, name) < 1:
                raise ParameterError(name, getattr(self, name), "at least 1")
        for name in ("beat_seconds", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ParameterError(name, getattr(self, name), "more than 0")
        if self.filter is not None and isinstance(self.consistency, ASP):
            raise ParameterError("filter", self.filter, "None with ASP, which has its own")
        if self.lost_after_seconds < 2 * self.beat_seconds:
            raise ParameterError(
                "lost_after_seconds",
                self.lost_after_seconds,
                f"at least two beats ({2 * self.beat_seconds:g})",
            )
