"""Slots for all roles of a run, checked before anything starts, and slots that are reserved.

Runs at the driver, on the caller's thread. Without enough slots a barrier job would never start,
and tasks would wait for others that can't. A server group's tasks outlive the runs that use them:
they reserve their slots here, process-wide, so that no run counts on those.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sparkdml.runtime.driver.cluster import Cluster
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.roles import (
    Resources,
    Role,
    RolesOf,
    demands,
    describe,
    most_workers,
    num_slots,
    num_tasks,
)

_lock = threading.Lock()
_reserved: list[Role] = []


@contextmanager
def reserved_slots(role: Role) -> Iterator[None]:
    """While this lasts, all runs find the slots of these tasks taken."""
    with _lock:
        _reserved.append(role)
    try:
        yield
    finally:
        with _lock:
            _reserved.remove(role)


def reserved_roles() -> list[Role]:
    with _lock:
        return list(_reserved)


class Slots:
    """What the roles need, asked of the cluster."""

    def __init__(self, cluster: Cluster, options: Options, roles_of: RolesOf) -> None:
        self._cluster, self._options, self._launched = cluster, options, roles_of
        # Whatever the number of workers turns out to be, their roles are of the same kinds.
        self._kinds = roles_of(max(1, 2 if options.num_workers is None else options.num_workers))

    def _roles_of(self, num_workers: int) -> list[Role]:
        """With the roles that have reserved slots."""
        return [*self._launched(num_workers), *reserved_roles()]

    @property
    def has_gang(self) -> bool:
        return any(role.gang for role in self._kinds)

    @property
    def has_open_wires(self) -> bool:
        """Whether ranks use a communicator, which neither authenticates nor encrypts."""
        return num_tasks([role for role in self._kinds if role.gang]) > 1

    @property
    def _is_elastic(self) -> bool:
        return self._cluster.setting("spark.dynamicAllocation.enabled") == "true"

    def wait(self) -> int:
        """The number of workers to launch: those asked for, or as many as there is room for."""
        count, usual = self._options.num_workers, self._options.resources
        if count is None or count < 1:  # which is refused there
            count = most_workers(self._roles_of, self._ask(count, usual))
        roles = self._roles_of(count)
        if self._is_elastic and not any(role.at_once for role in roles):
            return count  # executors start once there is work for them
        for resources, needed in demands(roles, usual).items():
            self._ask(needed, resources, roles)
        return count

    def wait_again(self, first_count: int) -> int:
        """After a failure: as many workers as before, or those that there is room for."""
        options, resources = self._options, self._options.resources
        wanted = num_slots(self._roles_of(first_count))
        slots = self._cluster.wait_for_replacements(
            wanted,
            num_slots(self._roles_of(min(options.min_workers, first_count))),
            resources=resources,
            profile=self._cluster.task_profile(resources),
            timeout_seconds=options.replacement_seconds,
        )
        return first_count if slots >= wanted else most_workers(self._roles_of, slots)

    def _ask(self, needed: int | None, resources: Resources, roles: Sequence[Role] = ()) -> int:
        plain = len(roles) < 2 and all(role.at_once for role in roles)
        return self._cluster.wait_for_slots(
            needed,
            resources,
            profile=self._cluster.task_profile(resources),
            timeout_seconds=self._options.slot_timeout,
            who=None if plain else describe(roles),
            gang=self.has_gang,
        )
