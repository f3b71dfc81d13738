"""Roles: the kinds of tasks that a run consists of, and how they are put into Spark jobs.

Pure values and functions, used by the driver, by tasks, and by strategies that name their roles.

Roles of the gang share one barrier job, in which those that read data have the first ranks. Each
other role is a job of ordinary tasks, which Spark retries one by one. Every task of a run has a
number: those of the job that trains come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Resources:
    """The needs of each task of a role.

    Args:
        cpus: torch threads, and slots where the cluster can give several to a task.
        gpus: which Spark must assign to it.
    """

    cpus: int = 1
    gpus: int = 0

    def covers(self, other: Resources) -> bool:
        return self.cpus >= other.cpus and self.gpus >= other.gpus


@dataclass(frozen=True)
class Role:
    """A kind of task that the driver must launch, and how many of them.

    Args:
        name: what `Strategy.run` is given.
        count: how many tasks.
        gang: whether they are a part of the barrier job, which fails and restarts as a whole, or
            ordinary tasks that Spark retries one by one.
        reads: "shards" of the data, "leases" (shards that move to other workers), the "validation"
            rows, which one task may read, or "none".
        resources: of each task; None for what the run's options say.
        at_once: whether all must run at the same time, as they wait for each other.
    """

    name: str
    count: int
    gang: bool = True
    reads: Literal["shards", "leases", "validation", "none"] = "shards"
    resources: Resources | None = None
    at_once: bool = True

    @property
    def trains_on_rows(self) -> bool:
        return self.reads in ("shards", "leases")


RolesOf = Callable[[int], Sequence[Role]]  # of the number of workers


def job_roles(roles: Sequence[Role]) -> list[tuple[Role, ...]]:
    """The roles of each Spark job; first the job that trains, whose first role reads the data."""
    ordered = sorted(roles, key=lambda role: not role.trains_on_rows)  # stable
    gang = tuple(role for role in ordered if role.gang)
    jobs: list[tuple[Role, ...]] = [(role,) for role in ordered if not role.gang]
    if gang:
        jobs.insert(0 if ordered[0].gang else len(jobs), gang)
    _check(ordered, gang)
    return jobs


def role_and_rank(roles: Sequence[Role], index: int) -> tuple[Role, int]:
    """The role of a job's task, and its rank among those of the same role."""
    for role in roles:
        if index < role.count:
            return role, index
        index -= role.count
    raise IndexError("a job has no more tasks than its roles say")


def num_tasks(roles: Sequence[Role]) -> int:
    return sum(role.count for role in roles)


def num_slots(roles: Sequence[Role]) -> int:
    """How many tasks must run at the same time, at least."""
    together = num_tasks([role for role in roles if role.at_once])
    return together + any(not role.at_once for role in roles)


def most_workers(roles_of: RolesOf, slots: int) -> int:
    """The largest number of workers whose roles all find a slot; 1 if not even those of 1 do."""
    count = 1
    while count < slots and num_tasks(roles_of(count + 1)) <= slots:
        count += 1
    return count


def demands(roles: Sequence[Role], usual: Resources) -> dict[Resources, int]:
    """How many slots of each size there must be: a large task takes the room of a small one."""
    sizes = {role.resources or usual for role in roles}
    return {
        size: num_slots([role for role in roles if (role.resources or usual).covers(size)])
        for size in sizes
    }


def describe(roles: Sequence[Role]) -> str:
    """For an error: "2 workers and 1 server"."""
    parts = [f"{role.count} {role.name}{'s' if role.count > 1 else ''}" for role in roles]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _check(ordered: Sequence[Role], gang: Sequence[Role]) -> None:
    assert len({role.name for role in ordered}) == len(ordered), "each role has its own name"
    assert all(role.count > 0 for role in ordered), "a role without tasks is left out"
    assert sum(role.trains_on_rows for role in ordered) <= 1, "one role reads the data"
    for role in ordered:
        alone = role.count == 1 and not role.gang
        assert role.reads != "validation" or alone, "one ordinary task reads what is held out"
    assert len({role.resources for role in gang}) <= 1, "one barrier job has tasks of one size"
    assert all(role.at_once for role in gang), "a gang runs at once"
