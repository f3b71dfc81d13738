"""Starts a Spark session, runs one small job and prints its findings as one line of JSON.

`sparkdml doctor` runs it in a child process (`python -m sparkdml.cli.checks.session_probe MASTER`),
so that Spark's log lines stay out of the report and a wait for the master can be abandoned.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

_SETTINGS = (
    "spark.task.resource.gpu.amount",
    "spark.local.dir",
    "spark.dynamicAllocation.enabled",
    "spark.speculation",
    "spark.authenticate",
    "spark.io.encryption.enabled",
    "spark.network.crypto.enabled",
)


def probe_session(master: str) -> dict[str, Any]:
    from pyspark import SparkConf, SparkContext

    # A plain context, without Spark SQL, starts a second or two faster.
    conf = SparkConf().setMaster(master).setAppName("sparkdml doctor")
    context = SparkContext(conf=conf.set("spark.ui.enabled", "false"))
    try:
        # One task would show one worker; a few more show a cluster's other hosts too.
        num_tasks = max(2, min(context.defaultParallelism, 16))
        answers = context.parallelize(range(num_tasks), num_tasks).mapPartitions(_describe())
        workers = [dict(found) for found in sorted(set(answers.collect()))]
        scala = context._jsc.sc()
        # This is the number that Spark compares with the size of a barrier stage.
        slots = scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile())
        return {
            "spark": context.version,
            "slots": slots,
            "workers": workers,
            "settings": {
                name: value for name in _SETTINGS if (value := context.getConf().get(name))
            },
        }
    finally:
        context.stop()


def _describe() -> Callable[[Iterable[int]], Iterable[tuple[tuple[str, str], ...]]]:
    # A nested function is pickled by value, so a worker without sparkdml can run it.
    def describe(_rows: Iterable[int]) -> Iterable[tuple[tuple[str, str], ...]]:
        import importlib.util
        import socket
        import sys

        wanted = ("torch", "pyarrow", "sparkdml")
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        yield (
            ("host", socket.gethostname()),
            ("python", sys.executable),
            ("version", f"{sys.version_info.major}.{sys.version_info.minor}"),
            ("missing", ", ".join(missing)),
        )

    return describe


if __name__ == "__main__":
    print(json.dumps(probe_session(sys.argv[1])))
