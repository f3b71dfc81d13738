"""One user of a server group: a fit, or a store. It has its own tables, clocks, members and key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sparkdml.errors import ParameterError
from sparkdml.server.client import WorkerClient
from sparkdml.server.config import ServerConfig
from sparkdml.server.consistency import ASP, BSP, SSP, TAP, Consistency
from sparkdml.server.membership import Membership
from sparkdml.server.seal import JobKey

MODELS: dict[str, type[Consistency]] = {model.__name__: model for model in (BSP, SSP, ASP, TAP)}


def secret_of(group_secret: bytes, number: int) -> bytes:
    """Of one application: who knows it learns nothing of the group's, or of another's."""
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
        """Of one of its workers, in this process."""
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
