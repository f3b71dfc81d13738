"""A store for functions that `dml.run` runs: some of the workers also serve it.

Each of the first `num_servers` workers has a server on a thread of its own, so servers need no job
and no slot (as in Petuum; Xing et al. 2015). The run's driver service has the membership. A worker
that dies ends the run, and its server with it; with the strategy `ParameterServer`, servers outlive
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sparkdml.errors import ParameterError, SetupError
from sparkdml.network.connection import Message, address_towards
from sparkdml.network.timeouts import Timeouts
from sparkdml.parameter_server.client.base import Ask, Client
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.client.merging import MergingClient
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import TAP, Consistency
from sparkdml.parameter_server.kvstore.store import KVStore
from sparkdml.parameter_server.membership import Membership
from sparkdml.parameter_server.server.node import ServerThread
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.runtime.protocol.service import TaskIdentity
from sparkdml.runtime.worker.context import Context

if TYPE_CHECKING:
    from sparkdml.parameter_server.application import Application, StandingServers

Result = TypeVar("Result")

EXPECT = "store.expect"  # how many clients there will be


class WithStore(Generic[Result]):
    """A function `fn(ctx, store)` as `dml.run` takes it: `dml.run(dml.WithStore(fn), …)`.

    Args:
        fn: called in every worker with its context and its end of a `KVStore`.
        num_servers: how many of the workers serve, at most all of them.
        consistency: how far workers may run apart: `BSP()`, `SSP(staleness)`, `ASP(significance)`,
            or `TAP()`, with which workers wait only at barriers.
        encrypted: whether messages between workers and servers are encrypted; None: if Spark's
            settings ask for it. They are always authenticated.
        merge_hosts: whether the pushes of a host's workers are added up before they cross the
            network, and their pulls are fetched once. All workers of a host must then make the same
            calls in the same order.
        servers: a `ServerGroup` to use, instead of servers in some of the workers.
    """

    def __init__(
        self,
        fn: Callable[[Context, KVStore], Result],
        num_servers: int = 1,
        consistency: Consistency | None = None,
        encrypted: bool | None = None,
        merge_hosts: bool = False,
        servers: StandingServers | None = None,
    ) -> None:
        if not callable(fn):
            raise ParameterError("fn", fn, "a function of two arguments, the context and the store")
        if num_servers < 1:
            raise ParameterError("num_servers", num_servers, "at least 1")
        if servers is not None and num_servers != 1:
            raise ParameterError("num_servers", num_servers, "left out if servers= is given")
        self._fn, self._merge_hosts, self._encrypted = fn, merge_hosts, encrypted
        self._num_servers, self._consistency = num_servers, consistency or TAP()
        self._servers, self._workers_serve = servers, servers is None
        self.__name__ = getattr(fn, "__name__", "fn")
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)

    def driver_service(self, num_workers: int) -> StoreService:
        """At the driver, for each submission."""
        if self._servers is not None:
            make = partial(self._config, num_workers=num_workers)
            return SharedStoreService(self._servers.applications.open(make, self._encrypted))
        if self._num_servers > num_workers:
            raise ParameterError(
                "num_servers", self._num_servers, f"at most num_workers ({num_workers})"
            )
        return StoreService(Membership(self._config(JobKey.new(), num_workers)))

    def _config(self, key: JobKey, num_workers: int) -> ServerConfig:
        return ServerConfig(
            key,
            num_servers=self._num_servers,
            num_workers=num_workers,
            consistency=self._consistency,
            # Servers end with the run, so a copy would be useless.
            replication=1 if self._workers_serve else 2,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_servers": None}  # which stay at the driver

    def __call__(self, ctx: Context) -> Result:
        encrypted = ctx.plan.must_encrypt if self._encrypted is None else self._encrypted
        config = self._config(JobKey.derive(ctx.plan.secret, encrypted), ctx.size)
        opened = _merged_client(ctx, config) if self._merge_hosts else _own_client(ctx, config)
        with _serving(ctx, config) if self._workers_serve else nullcontext():
            with opened as client, KVStore(client, ctx.size, ctx.rank) as store:
                result = self._fn(ctx, store)
            ctx.comm.barrier()  # others may still need the server
        return result


@contextmanager
def _own_client(ctx: Context, config: ServerConfig) -> Iterator[Client]:
    yield WorkerClient(ctx.rank, config, _ask_of(ctx))


@contextmanager
def _merged_client(ctx: Context, config: ServerConfig) -> Iterator[Client]:
    """Merge a host's workers: the first has a client, which the others use."""
    hosts = list(dict.fromkeys(ctx.world.hosts))
    here = hosts.index(ctx.host)
    if ctx.rank == 0:
        ctx.ask(EXPECT, count=len(hosts))
    ctx.comm.barrier()  # or a host could come before it is known how many there are
    with ctx.comm.split(here) as on_host:
        client = None
        if on_host.rank == 0:
            client = WorkerClient(here, replace(config, num_workers=len(hosts)), _ask_of(ctx))
        yield MergingClient(on_host, client)


class StoreService:
    """The servers' membership, as the run's driver service."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def use_timeouts(self, timeouts: Timeouts) -> None:
        self._membership.use_timeouts(timeouts)

    def answer(self, peer: TaskIdentity, about: str, fields: Message) -> Any:
        if about == EXPECT:
            self._membership.expect_workers(int(fields["count"]))
            return True
        return self._membership.answer(about, fields)

    def on_join(self, peer: TaskIdentity) -> None:
        """Nothing to do: a member joins by its own questions."""

    def on_leave(self, peer: TaskIdentity, outcome: str) -> None:
        """All workers are one gang: the run ends with the first that fails."""


class SharedStoreService(StoreService):
    """For a store on servers of a group."""

    def __init__(self, application: Application) -> None:
        super().__init__(application.membership)
        self.secret, self.close = application.secret, application.close


def _ask_of(ctx: Context) -> Ask:
    def ask(what: str, **fields: Any) -> Any:
        return ctx.ask(what, **fields)

    return ask


@contextmanager
def _serving(ctx: Context, config: ServerConfig) -> Iterator[None]:
    """A server on a thread of its own, if this worker has one."""
    if ctx.rank >= config.num_servers:
        yield
        return
    host = address_towards(ctx.plan.driver_host)
    if host is None:
        raise SetupError(f"rank {ctx.rank} has no address towards {ctx.plan.driver_host}")
    server = ServerThread(ctx.rank, config, _ask_of(ctx), host)
    server.start()
    try:
        yield
    finally:
        server.stop()
    if server.error is not None:
        raise server.error
