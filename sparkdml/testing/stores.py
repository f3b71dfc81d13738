"""Workers on threads, each with a communicator and its end of a store on real servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sparkdml.comm.base import Communicator
from sparkdml.comm.threads import run_threads
from sparkdml.kvstore.store import KVStore
from sparkdml.server.consistency import TAP
from sparkdml.testing.server_cluster import ServerCluster

Result = TypeVar("Result")


def run_workers(
    num_workers: int,
    fn: Callable[[Communicator, KVStore], Result],
    num_servers: int = 1,
    timeout_seconds: float = 60.0,
    **settings: Any,
) -> list[Result]:
    """Run `fn(comm, store)` in every worker; their results in rank order.

    `settings` are those of `ServerConfig`; without a `consistency` nobody waits for anybody, as
    suits programs that keep in step by their rounds.
    """
    settings = {"consistency": TAP(), **settings}
    with ServerCluster(num_servers, num_workers, **settings) as cluster:

        def work(comm: Communicator) -> Result:
            with KVStore(cluster.client(comm.rank), num_workers) as store:
                return fn(comm, store)

        return run_threads(num_workers, work, timeout_seconds)
