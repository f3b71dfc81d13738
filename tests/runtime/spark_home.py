"""A Spark home whose `work/` folder is the test's own: cluster modes write there."""

import os
from pathlib import Path

import pyspark


def make_spark_home(folder: Path) -> Path:
    home = folder / "spark-home"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


# Short jobs spend more on the JVM's second compiler than they get from it.
QUICK_JVM = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}


def cluster_environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        **QUICK_JVM,
        "SPARK_HOME": str(make_spark_home(folder)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_WORKER_DIR": str(folder / "worker"),
        "PYSPARK_PYTHON": os.sys.executable,
    }
