"""What a run needs of a cluster, whichever way the session reaches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

    from sparkdml.runtime.protocol.plan import Resources


class Cluster(Protocol):
    """Settings, slots, and jobs that can be cancelled."""

    worker_python: str  # as far as the session knows
    reports_facts: bool  # whether Spark's counts of the rows are known while a job still runs
    shares_disks: bool  # whether workers' local disks are certainly this process's, too

    def setting(self, key: str) -> str | None:
        """One of Spark's settings, None if it is not set."""
        ...

    def driver_host(self) -> str:
        """The address at which workers reach this process, and the only one that is listened on."""
        ...

    def task_cpus(self) -> int:
        """The session's own spark.task.cpus."""
        ...

    def check_worker_python(self) -> None:
        """Raise a SetupError if it is clear already that workers can't run our code."""
        ...

    def task_profile(self, resources: Resources) -> ResourceProfile | None:
        """A stage-level profile where a task needs more than the session's settings give it."""
        ...

    def wait_for_slots(
        self,
        needed: int | None,
        resources: Resources,
        profile: ResourceProfile | None,
        timeout_seconds: float,
        who: str | None = None,
        gang: bool = True,
    ) -> int:
        """The number of tasks to launch: `needed`, or all slots. `who` they are, for an error."""
        ...

    def wait_for_replacements(
        self,
        wanted: int,
        least: int,
        resources: Resources,
        profile: ResourceProfile | None,
        timeout_seconds: float,
    ) -> int:
        """After a failure: how many workers to continue with."""
        ...

    def thread(self, target: Callable[[], None], group: str, name: str) -> threading.Thread:
        """A thread whose jobs `cancel(group)` ends; the Spark UI shows them as `name`."""
        ...

    def cancel(self, group: str) -> None: ...

    def kill_task(self, task_id: int) -> bool:
        """End one attempt at a task, so that Spark starts another; False if that can't be had."""
        ...
