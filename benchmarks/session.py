"""The processes' environment and the one Spark session that all Spark contenders share."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.workloads import WORKERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REPOSITORY = Path(__file__).resolve().parent.parent


def prepare_environment() -> None:
    """Set what every child process and Spark's own workers inherit. Call it before any starts."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning"  # a peer's loader warns at every call
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def start_session() -> SparkSession:
    import sparkdml

    session = (
        sparkdml.session_builder()
        .master(f"local[{WORKERS}]")
        .appName("sparkdml benchmarks")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session
