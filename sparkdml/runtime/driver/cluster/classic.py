"""A classic session: the driver's JVM is at hand, so slots can be counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkdml.runtime.driver import preflight

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkdml.runtime.protocol.plan import Resources


class ClassicCluster:
    """Asks the SparkContext."""

    reports_facts = True

    def __init__(self, spark: SparkSession) -> None:
        self._sc = spark.sparkContext
        self.shares_disks = preflight.is_local(self._sc)
        self.worker_python = self._sc.pythonExec

    def setting(self, key: str) -> str | None:
        return preflight.session_setting(self._sc, key)

    def driver_host(self) -> str:
        return preflight.driver_host(self._sc)

    def task_cpus(self) -> int:
        return int(self.setting("spark.task.cpus") or 1)

    def check_worker_python(self) -> None:
        preflight.check_worker_python(self._sc)

    def task_profile(self, resources: Resources) -> ResourceProfile | None:
        return preflight.task_profile(self._sc, resources)

    def wait_for_slots(
        self,
        needed: int | None,
        resources: Resources,
        profile: ResourceProfile | None,
        timeout_seconds: float,
        who: str | None = None,
        gang: bool = True,
    ) -> int:
        return preflight.wait_for_slots(
            self._sc,
            needed,
            resources=resources,
            profile=profile,
            timeout_seconds=timeout_seconds,
            who=who,
        )

    def wait_for_replacements(
        self,
        wanted: int,
        least: int,
        resources: Resources,
        profile: ResourceProfile | None,
        timeout_seconds: float,
    ) -> int:
        return preflight.wait_for_replacements(
            self._sc,
            wanted,
            least=least,
            resources=resources,
            profile=profile,
            timeout_seconds=timeout_seconds,
        )

    def thread(self, target: Callable[[], None], group: str, name: str) -> threading.Thread:
        from pyspark import InheritableThread

        def submit() -> None:
            self._sc.setJobGroup(group, name, interruptOnCancel=True)
            target()

        thread: threading.Thread = InheritableThread(target=submit, name=group)
        thread.daemon = True
        return thread

    def cancel(self, group: str) -> None:
        self._sc.cancelJobGroup(group)

    def kill_task(self, task_id: int) -> bool:
        jsc: Any = self._sc._jsc.sc()
        killed: bool = jsc.killTaskAttempt(task_id, True, "its process sends no heartbeats")
        return killed
