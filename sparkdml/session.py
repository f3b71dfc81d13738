"""A session that suits training: offered, never needed."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    # Python workers are forked from a process that has torch already: a second less each.
    "spark.python.daemon.module": "sparkdml.daemon",
    # Two progress bars on one line would overwrite each other.
    "spark.ui.showConsoleProgress": "false",
    # After a loss, Spark looks for free slots every 15 s by default.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}


def session_builder(app_name: str = "sparkdml", master: str | None = None) -> SparkSession.Builder:
    """A `SparkSession.builder` with settings under which workers start fast.

    The workers get the driver's own Python unless PYSPARK_PYTHON says otherwise. `master=None`
    leaves it to spark-submit, or to `local[*]`. Whatever you set on the builder afterwards wins.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for key, value in SETTINGS.items():
        builder = builder.config(key, value)
    return builder
