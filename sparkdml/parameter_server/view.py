"""A view of the group: its servers and workers, as the driver last published them. Immutable.

`generation` counts the changes among the servers, `roster` those among the workers. A server that
starts while the group is running is first `joining`: it is not yet on the ring, receives copies of
the parts that it will own, and is put onto the ring when it has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sparkdml.parameter_server.partition import Key, Ring, place_of


@dataclass(frozen=True)
class Member:
    """A server's address, and the number of its end of the wire: new with each start."""

    address: str
    number: int


@dataclass(frozen=True)
class View:
    generation: int = 0  # 0: the group hasn't begun
    roster: int = 0
    replication: int = 1
    started: bool = False  # whether all workers that were expected have come
    servers: Mapping[int, Member] = field(default_factory=dict)
    joining: Mapping[int, Member] = field(default_factory=dict)
    workers: Mapping[int, int] = field(default_factory=dict)  # -> the number of the client's end
    expelled: tuple[int, ...] = ()  # workers that are not waited for

    @cached_property
    def ring(self) -> Ring:
        return Ring(self.servers)

    @cached_property
    def future_ring(self) -> Ring:
        return Ring([*self.servers, *self.joining]) if self.joining else self.ring

    @cached_property
    def members(self) -> dict[int, Member]:
        return {**self.servers, **self.joining}

    @cached_property
    def _replicas(self) -> dict[Key, tuple[int, ...]]:
        return {}

    def replicas(self, key: Key) -> tuple[int, ...]:
        """Return a part's primary, then its replicas, then joining servers that copy it."""
        found = self._replicas.get(key)
        if found is None:
            point = place_of(key)
            found = self.ring.owners(point, self.replication)
            if self.joining:
                future = self.future_ring.owners(point, self.replication)
                found += tuple(server_id for server_id in future if server_id in self.joining)
            self._replicas[key] = found
        return found

    def primary(self, key: Key) -> int:
        return self.replicas(key)[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "roster": self.roster,
            "replication": self.replication,
            "started": self.started,
            "servers": _members_to_list(self.servers),
            "joining": _members_to_list(self.joining),
            "slow": list(self.expelled),
            "workers": [[worker, number] for worker, number in self.workers.items()],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> View:
        return cls(
            generation=fields["generation"],
            roster=fields["roster"],
            replication=fields["replication"],
            started=fields["started"],
            servers=_members_from_list(fields["servers"]),
            joining=_members_from_list(fields["joining"]),
            workers=dict(fields["workers"]),
            expelled=tuple(fields["slow"]),
        )


def _members_to_list(members: Mapping[int, Member]) -> list[list[Any]]:
    return [[server_id, member.address, member.number] for server_id, member in members.items()]


def _members_from_list(items: list[list[Any]]) -> dict[int, Member]:
    return {server_id: Member(address, number) for server_id, address, number in items}
