"""One user of a server group, a fit or a store: its own tables, clocks, members and key.

At the driver a group keeps its applications, and the service that its servers ask: from time to
time each server asks which applications have been opened or closed, and runs a server for each.
What that server asks of its membership comes here too, with the application's number. Called on the
control server's threads, and on those that open and close applications.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.network.connection import Message
from sparkdml.parameter_server.client.client import WorkerClient
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import ASP, BSP, SSP, TAP, Consistency
from sparkdml.parameter_server.membership import Membership
from sparkdml.parameter_server.wire.seal import JobKey
from sparkdml.runtime.protocol.service import TaskIdentity

MODELS: dict[str, type[Consistency]] = {model.__name__: model for model in (BSP, SSP, ASP, TAP)}


def secret_of(group_secret: bytes, number: int) -> bytes:
    """Derive an application's key, from which neither the group's nor another's follows."""
    text = number.to_bytes(8, "little")
    return hashlib.blake2b(
        text, key=group_secret, digest_size=32, person=b"sparkdml-guest"
    ).digest()


class Application:
    """At the driver. `secret` is known to the servers, and is to be told to its workers alone.

    Args:
        number: of this application in its group.
        secret: from which the key of its messages is made.
        config: as its workers have it.
        on_close: called once.
    """

    def __init__(
        self,
        number: int,
        secret: bytes,
        config: ServerConfig,
        on_close: Callable[[Application], None],
    ) -> None:
        self.number, self.secret, self.config = number, secret, config
        self.membership = Membership(config)
        self.description = describe(config)
        self._on_close = on_close

    def client(self, worker: int = 0) -> WorkerClient:
        """The client of one of its workers, in this process."""
        return WorkerClient(worker, self.config, self.ask)

    def ask(self, what: str, **fields: Any) -> Any:
        return self.membership.answer(what, fields)

    def close(self) -> None:
        """The servers forget it, and all its tables."""
        self.membership.stop()
        self._on_close(self)


def describe(config: ServerConfig) -> dict[str, Any]:
    """What servers must know of it, but for its key: as JSON, since nothing is unpickled there."""
    consistency = config.consistency
    if MODELS.get(type(consistency).__name__) is not type(consistency):
        raise ParameterError(
            "consistency", consistency, f"one of {', '.join(MODELS)} where servers= is given"
        )
    return {
        "consistency": type(consistency).__name__,
        "settings": asdict(consistency),
        "num_servers": config.num_servers,
        "replication": config.replication,
        "finite_only": config.finite_only,
        "beat_seconds": config.beat_seconds,
        "lost_after_seconds": config.lost_after_seconds,
        "timeout_seconds": config.timeout_seconds,
        "encrypted": config.key.encrypted,
    }


def config_from(description: Mapping[str, Any], secret: bytes) -> ServerConfig:
    """The inverse, in a server."""
    given = dict(description)
    key = JobKey.derive(secret, bool(given.pop("encrypted")))
    consistency = MODELS[given.pop("consistency")](**given.pop("settings"))
    return ServerConfig(key, consistency=consistency, **given)


WHICH, ASK, FAILED = "group.which", "group.ask", "group.failed"  # servers' questions and reports


class Applications:
    """Safe to call from several threads."""

    def __init__(self, num_servers: int, secret: bytes, must_encrypt: bool = False) -> None:
        self.num_servers, self.secret, self.must_encrypt = num_servers, secret, must_encrypt
        self._lock = threading.Lock()
        self._num_opened = 0
        self._open: dict[int, Application] = {}
        self._over: str | None = None  # why there are no servers any more
        self._here: set[int] = set()  # the ranks of servers that have joined
        self._all_here = threading.Event()

    def open(
        self, make_config: Callable[[JobKey], ServerConfig], encrypted: bool | None = None
    ) -> Application:
        """A new one, with the settings that `make_config` says, but for the number of servers."""
        encrypted = self.must_encrypt if encrypted is None else encrypted
        with self._lock:
            if self._over is not None:
                raise CommunicationError(f"the server group accepts no runs: {self._over}")
            self._num_opened += 1
            secret = secret_of(self.secret, self._num_opened)
            config = make_config(JobKey.derive(secret, encrypted))
            config = replace(config, num_servers=self.num_servers)
            opened = Application(self._num_opened, secret, config, self._forget)
            self._open[opened.number] = opened
        return opened

    def end(self, why: str) -> None:
        """Let the servers end. Applications that are still open fail with that reason."""
        with self._lock:
            self._over = self._over or why
            opened = list(self._open.values())
        for application in opened:
            application.membership.fail(why)

    def wait_for_servers(self, timeout_seconds: float) -> bool:
        return self._all_here.wait(timeout_seconds)

    def _forget(self, application: Application) -> None:
        with self._lock:
            self._open.pop(application.number, None)

    # -- the driver service of the servers' job ---------------------------------------------------

    def answer(self, peer: TaskIdentity, about: str, fields: Message) -> Any:
        with self._lock:
            opened, is_over = dict(self._open), self._over is not None
        if about == WHICH:
            described = [[each.number, each.description] for each in opened.values()]
            return {"over": is_over, "applications": described}
        application = opened.get(int(fields["application"]))
        if about == FAILED:
            if application is not None:
                application.membership.fail(f"server {peer.rank}: {fields['why']}")
            return True
        if application is None:
            return {"stop": True}
        return application.ask(str(fields["question"]), **fields["fields"])

    def on_join(self, peer: TaskIdentity) -> None:
        with self._lock:
            self._here.add(peer.rank)
            if len(self._here) >= self.num_servers:
                self._all_here.set()

    def on_leave(self, peer: TaskIdentity, outcome: str) -> None:
        """Each application's other servers stand in, until Spark has started this one again."""
        if outcome == "done":
            return  # the group is over
        with self._lock:
            opened = list(self._open.values())
        for application in opened:
            application.membership.lost_server(peer.rank)

    def close(self) -> None:
        """Their job has ended; the group says why."""


class StandingServers(Protocol):
    """Servers that run already, for any number of applications: a `dml.ServerGroup`."""

    @property
    def num_servers(self) -> int: ...

    @property
    def applications(self) -> Applications: ...
