"""The cluster of the chaos run: executors to kill, a small disk to fill, a store to cut off.

All of them are real. The executors are those of `local-cluster`, which have their own processes.
The disk is a tmpfs with Spark's local directories; mounting it needs root, and without it no disk
is filled. The store is moto's S3 server behind a port that can be closed: connections are then
refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.session import prepare_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local-cluster[2,1,1024]"
DISK_MEGABYTES = 256
BUCKET = "chaos"


class Disk:
    """A separate file system for Spark's local directories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        size = f"size={DISK_MEGABYTES}m,mode=0700"
        mount = ["mount", "-t", "tmpfs", "-o", size, "sparkdml-chaos", str(folder)]
        self.is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        assert self.is_mounted, "the machine's own disk is never filled"
        block = bytes(1 << 20)
        with open(self._ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(block)  # at the end, as much of it as fits
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


class Authenticator:
    """A TCP port that forwards to another one until it is closed."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port = free_port()
        self.unlock()

    def unlock(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._admit, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse new connections, and close the existing ones."""
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            thrown_out, self._open = self._open, set()
        for connection in thrown_out:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _admit(self, listener: socket.socket) -> None:
        while True:
            try:
                outside, _ = listener.accept()
            except OSError:
                return  # shut
            inside = socket.create_connection(("127.0.0.1", self._target))
            with self._lock:
                self._open |= {outside, inside}
            for source, sink in ((outside, inside), (inside, outside)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)
        with self._lock:
            self._open.discard(source)


class ObjectStore:
    """moto's S3 server behind a port that can be closed."""

    def __init__(self) -> None:
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_for(f"http://127.0.0.1:{port}/moto-api/")
        self.authenticator = Authenticator(port)
        self.options: dict[str, Any] = {
            "key": "chaos",
            "secret": "not-a-secret",
            "endpoint_url": f"http://127.0.0.1:{self.authenticator.port}",
        }
        import s3fs  # type: ignore[import-untyped]

        s3fs.S3FileSystem(**self.options, skip_instance_cache=True).mkdir(BUCKET)

    def _wait_for(self, address: str) -> None:
        for _ in range(600):
            try:
                urllib.request.urlopen(address, timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError) as error:
                if self._server.poll() is not None:
                    fix = "pip install 'moto[s3]' flask-cors s3fs"
                    raise RuntimeError(f"moto's server ended: {fix}") from error
                time.sleep(0.05)
        raise TimeoutError(f"{address} does not answer")

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_cluster(folder: Path, disk: Disk) -> SparkSession:
    """Two executors with one slot each, whose files all lie in `folder` and on `disk`."""
    import pyspark

    import sparkdml as dml

    home = folder / "spark-home"  # cluster modes write into Spark's own folder
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    prepare_environment()
    os.environ["SPARK_HOME"] = str(home)
    os.environ["SPARK_LOCAL_DIRS"] = str(disk.folder)
    os.environ["SPARK_WORKER_DIR"] = str(folder / "worker")
    session = (
        dml.session_builder("chaos", MASTER)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        # Small pieces, so that the first epoch still spools when the disk is full.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "200")
        # Spark gives up an application after ten executors that ended, which is what we do to it.
        .config("spark.deploy.maxExecutorRetries", "-1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session
