"""Spark sessions, in the driver: a builder with settings for training, and finding the session.

The builder is optional; training works with any session.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from sparkdml.errors import ParameterError

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession

DAEMON = "spark.python.daemon.module"
SETTINGS = {
    # Python workers are forked from a process that has imported torch: each starts a second sooner.
    DAEMON: "sparkdml.daemon",
    # Spark keeps one daemon per set of environment variables, and sets this one for SQL tasks only.
    # Setting it for RDD tasks too (`dml.run`, `createDataFrame`) lets both share a daemon, so that
    # torch is imported once.
    "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
    # Two progress bars on one line would overwrite each other.
    "spark.ui.showConsoleProgress": "false",
    # After a failure, Spark checks for free slots every 15 s by default.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}


def session_builder(
    app_name: str = "sparkdml", master: str | None = None, *, remote: str | None = None
) -> SparkSession.Builder:
    """Return a `SparkSession.builder` with settings that make workers start fast.

    Workers use the driver's Python unless PYSPARK_PYTHON is set. With `master=None`, spark-submit
    chooses the master (default: `local[*]`). Settings made on the builder afterwards take
    precedence.

    `remote` is for Spark Connect: "sc://host:port", or "local[2]" for a server that pyspark starts
    itself. The settings apply only to a server that is started here.
    """
    from pyspark.sql import SparkSession

    if remote is not None and master is not None:
        raise ParameterError(
            "remote", remote, f"None if master is given ({master!r})", "Set only one of them."
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    if remote is not None:
        builder = builder.remote(remote)
    if remote is None or remote.startswith("local"):
        for key, value in SETTINGS.items():
            if key != DAEMON or _is_installed():
                builder = builder.config(key, value)
    return builder


def find_session(
    data: DataFrame | RDD[Any] | None, spark: SparkSession | None = None
) -> SparkSession:
    """The session that the data belongs to, the active one, or a new local one."""
    from pyspark.sql import DataFrame, SparkSession

    if spark is None and isinstance(data, DataFrame):
        spark = data.sparkSession
    if spark is None:
        spark = SparkSession.getActiveSession()
    if spark is None:
        spark = session_builder().getOrCreate()
    return spark


def _is_installed() -> bool:
    """Whether executors can import sparkdml when they start Python, before a task runs.

    Packages from `--py-files` are in a folder that is on the path of tasks only.
    """
    return ".zip" + os.sep not in __file__ and "userFiles-" not in __file__
