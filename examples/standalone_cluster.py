"""A Spark cluster for one job: `python examples/standalone_cluster.py examples/mnist.py`.

Starts a master and two workers of one core each on this machine, submits the script with its
arguments to them, and always stops them in the end. All processes listen on 127.0.0.1, on free
ports. On a real cluster you only need the spark-submit:

    PYSPARK_PYTHON=/path/to/venv/bin/python spark-submit --master spark://host:7077 script.py

where every host has the venv, with torch and sparkdml in it, at that path.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyspark

NUM_WORKERS, MEMORY = 2, "1g"
START_SECONDS = 180


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def make_spark_home(folder: Path) -> Path:
    """Link pip's Spark: a cluster writes into its home, which may be read-only."""
    home = folder / "spark"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    return home


def wait_for(log: Path, text: str, times: int, daemons: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while log.read_text(errors="replace").count(text) < times:
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            raise SystemExit(f"the cluster did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def run_on_a_cluster(script: list[str], folder: Path) -> int:
    home = make_spark_home(folder)
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # it would take a port of its own
        "PYSPARK_PYTHON": sys.executable,  # the executors' Python, and its packages
    }
    port = free_port()
    url, web = f"spark://127.0.0.1:{port}", ["--host", "127.0.0.1", "--webui-port", "0"]
    daemons: list[subprocess.Popen[bytes]] = []
    log = folder / "master.log"

    def start(name: str, log: Path, *arguments: str) -> None:
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        with log.open("wb") as output:
            daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))

    try:
        start("master.Master", log, *web, "--port", str(port))
        wait_for(log, "I have been elected leader", 1, daemons)
        for number in range(NUM_WORKERS):
            size = ["--cores", "1", "--memory", MEMORY]
            start("worker.Worker", folder / f"worker-{number}.log", *web, *size, url)
        wait_for(log, "Registering worker", NUM_WORKERS, daemons)
        submit = [str(home / "bin" / "spark-submit"), "--master", url, "--executor-memory", MEMORY]
        submit += ["--conf", "spark.log.level=WARN"]
        return subprocess.run([*submit, *script], env=environment, check=False).returncode
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script and its arguments")
    options = parser.parse_args()
    if not options.script:
        parser.error("name a script, for instance examples/mnist.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster ends, too
    with tempfile.TemporaryDirectory(prefix="sparkdml-cluster-") as folder:
        sys.exit(run_on_a_cluster(options.script, Path(folder)))


if __name__ == "__main__":
    main()
