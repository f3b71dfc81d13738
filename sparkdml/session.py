"""The Spark session: a builder with settings that suit training, and which session is meant.

Driver only. Nobody needs the builder: any session will do.
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
    # Python workers are forked from a process that has torch already: a second less each.
    DAEMON: "sparkdml.daemon",
    # Spark keeps a daemon for each set of variables, and only its SQL tasks have this one: with it
    # in RDDs' tasks too (`dml.run`, `createDataFrame`), torch is imported once and not twice.
    "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
    # Two progress bars on one line would overwrite each other.
    "spark.ui.showConsoleProgress": "false",
    # After a loss, Spark looks for free slots every 15 s by default.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}


def session_builder(
    app_name: str = "sparkdml", master: str | None = None, *, remote: str | None = None
) -> SparkSession.Builder:
    """A `SparkSession.builder` with settings under which workers start fast.

    The workers get the driver's own Python unless PYSPARK_PYTHON says otherwise. `master=None`
    leaves it to spark-submit, or to `local[*]`. Whatever you set on the builder afterwards wins.

    `remote` is for Spark Connect: "sc://host:port", or "local[2]" for a server that pyspark starts
    itself. A server that runs already has its settings; one that is started gets these.
    """
    from pyspark.sql import SparkSession

    if remote is not None and master is not None:
        raise ParameterError(
            "remote", remote, f"None where master is given ({master!r})", "Give one of the two."
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
    """Whether executors find sparkdml when they start Python, and not only once a task runs.

    What came by `--py-files` is unpacked or zipped in a folder that the daemon does not know.
    """
    import sparkdml

    home = str(sparkdml.__file__)
    return ".zip" + os.sep not in home and "userFiles-" not in home
