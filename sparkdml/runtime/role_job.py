"""One Spark job of a run, on a thread and in a job group of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.runtime.cluster import Cluster
from sparkdml.runtime.jobs import Job, Parts
from sparkdml.runtime.plan import Plan

if TYPE_CHECKING:
    import threading


class RoleJob:
    """Started once; then it runs until Spark has ended it, well or not."""

    def __init__(self, cluster: Cluster, job: Job, plan: Plan, name: str) -> None:
        self.job, self.plan = job, plan
        self.parts: Parts = []
        self.error: Exception | None = None
        self._cluster = cluster
        self._group = plan.run_id if not plan.first_number else f"{plan.run_id}-{plan.role.name}"
        title = name if not plan.first_number else f"{name}, {plan.role.name}"
        self._thread: threading.Thread = cluster.thread(self._submit, self._group, title)

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(role.name for role in self.plan.job_roles)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def cancel(self) -> None:
        self._cluster.cancel(self._group)

    def _submit(self) -> None:
        try:
            self.parts = self.job.collect()
        except Exception as error:
            self.error = error
