"""Counters of clients and servers: bytes, waits, staleness, queues, and frames that were dropped.

Plain numbers, so that they go into events as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ClientStats:
    """One worker's view. Written by its own threads only; reading is safe at any time."""

    bytes_pushed: int = 0
    bytes_pulled: int = 0
    pushes: int = 0  # parts whose push was acknowledged
    pulls: int = 0  # parts that were read from a server
    repeated: int = 0  # parts that had had a push from an earlier life of this worker
    cached_pulls: int = 0  # tables that were read from the cache, within the bound
    resent: int = 0  # requests that were sent again, to the same server or to its successor
    wait_seconds: float = 0.0  # what the caller spent in waiting
    longest_queue: int = 0  # of requests under way
    staleness: Counter[int] = field(default_factory=Counter)  # clocks behind -> reads
    dropped: Counter[str] = field(default_factory=Counter)  # why -> frames

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes_pushed": self.bytes_pushed,
            "bytes_pulled": self.bytes_pulled,
            "pushes": self.pushes,
            "pulls": self.pulls,
            "repeated": self.repeated,
            "cached_pulls": self.cached_pulls,
            "resent": self.resent,
            "wait_seconds": self.wait_seconds,
            "longest_queue": self.longest_queue,
            "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
            "dropped": dict(self.dropped),
        }


@dataclass
class NodeStats:
    """One server's view."""

    pushes: int = 0  # parts that an acknowledged push was applied to, or is kept for a step
    repeated: int = 0  # pushes that had been applied before, and were acknowledged again
    pulls: int = 0
    bytes_pushed: int = 0  # what came, also where it was refused or had come before
    bytes_pulled: int = 0
    rows_named: int = 0  # lists of rows that came as a signature
    installs: int = 0  # whole parts that were sent to another server
    queue: int = 0  # reads that wait for the clock now
    longest_queue: int = 0  # as many as ever waited at the same time
    dropped: Counter[str] = field(default_factory=Counter)  # why -> frames

    def to_dict(self) -> dict[str, Any]:
        return {
            "pushes": self.pushes,
            "repeated": self.repeated,
            "pulls": self.pulls,
            "bytes_pushed": self.bytes_pushed,
            "bytes_pulled": self.bytes_pulled,
            "rows_named": self.rows_named,
            "installs": self.installs,
            "queue": self.queue,
            "longest_queue": self.longest_queue,
            "dropped": dict(self.dropped),
        }
