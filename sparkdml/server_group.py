"""Parameter servers that outlive a run: `with dml.ServerGroup(num_servers=2) as group: …`.

Driver only. A thread of its own runs the servers' Spark job until the group is closed.
"""

from __future__ import annotations

import secrets
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from sparkdml.errors import check_whole
from sparkdml.network.timeouts import SERVER_GROUP_LEAVE_SECONDS
from sparkdml.parameter_server.application import Applications
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import TAP, Consistency
from sparkdml.parameter_server.kvstore.store import KVStore
from sparkdml.parameter_server.server_task import host_servers
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.runtime.driver.cluster import find_cluster
from sparkdml.runtime.driver.launch import launch
from sparkdml.runtime.driver.preflight import must_encrypt_wires
from sparkdml.runtime.driver.request import LaunchRequest
from sparkdml.runtime.driver.slots import reserved_slots
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.roles import Role
from sparkdml.session import find_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from typing_extensions import Self

LOOK_SECONDS = 0.05


class ServerGroup:
    """Servers for several runs at once: each has its own tables, clocks, members and key.

    The servers are tasks of one Spark job, which keeps its slots until the group is closed. Fits
    use them through `dml.ParameterServer(servers=group)`, several fits on threads at the same time
    if wanted; functions in `dml.run` through `dml.WithStore(fn, servers=group)`; and the driver
    through `group.store()`. Runs are isolated: none sees another's tables, waits for its workers or
    fails with it, and a run's tables are removed when it ends. Spark restarts a lost server;
    meanwhile the others serve its parts, as each run's `replication` allows.

    Args:
        num_servers: the number of servers: each takes a slot.
        spark: the session; None for the active one.
        slot_timeout: how many seconds to wait for slots.
    """

    def __init__(
        self, num_servers: int = 2, spark: SparkSession | None = None, slot_timeout: float = 60.0
    ) -> None:
        self.num_servers = check_whole("num_servers", num_servers, 1)
        self._spark = find_session(None, spark)
        self._options = Options(
            num_workers=num_servers,
            slot_timeout=slot_timeout,
            name="sparkdml: server group",
        )
        must_encrypt = must_encrypt_wires(find_cluster(self._spark).setting)
        self.applications = Applications(num_servers, secrets.token_bytes(32), must_encrypt)
        self._error: BaseException | None = None
        self._reserved = ExitStack()
        self._thread = threading.Thread(target=self._run, name="sparkdml-server-group", daemon=True)

    def start(self) -> Self:
        """Start the servers, and wait until they serve. Called by `with`."""
        self._thread.start()
        while not self.applications.wait_for_servers(LOOK_SECONDS):
            if not self._thread.is_alive():
                assert self._error is not None, "servers don't end by themselves"
                raise self._error
        self._reserved.enter_context(reserved_slots(Role("standing server", self.num_servers)))
        return self

    @contextmanager
    def store(
        self,
        consistency: Consistency | None = None,
        replication: int = 2,
        encrypted: bool | None = None,
    ) -> Iterator[KVStore]:
        """Open a store on these servers for the driver: `with group.store() as store: …`."""

        def config(key: JobKey) -> ServerConfig:
            return ServerConfig(key, consistency=consistency or TAP(), replication=replication)

        application = self.applications.open(config, encrypted)
        try:
            with KVStore(application.client(), num_workers=1) as store:
                yield store
        finally:
            application.close()

    def close(self) -> None:
        """Stop the servers. Runs that still use them fail with that reason."""
        self.applications.end("the server group was closed")
        self._thread.join(SERVER_GROUP_LEAVE_SECONDS)
        self._reserved.close()
        if self._thread.is_alive():
            warnings.warn(
                f"the servers have not ended within {SERVER_GROUP_LEAVE_SECONDS:g} s: their job "
                f"may still occupy {self.num_servers} slots",
                stacklevel=2,
            )
        elif self._error is not None:
            warnings.warn(f"the server group ended with an error: {self._error}", stacklevel=2)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            launch(
                LaunchRequest(
                    self._spark,
                    host_servers,
                    self._options,
                    roles_of=_servers_alone,
                    make_service=lambda num_servers: self.applications,
                )
            )
        except BaseException as error:  # raised by `start` and `close`
            self._error = error
            self.applications.end(f"the server group has failed: {error}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ServerGroup can't be pickled: it belongs to the driver")


def _servers_alone(num_servers: int) -> list[Role]:
    return [Role("server", num_servers, gang=False, reads="none")]
