"""Real servers on the loopback interface: S3 (moto), FTP (pyftpdlib), HDFS (Hadoop 2.7)."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_JARS = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sparkdml/hdfs-2.7.3"
)
KEY, SECRET = "AKIAEXAMPLE", "not-a-real-secret"


def need(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install '{install}')")


class S3Server:
    """moto's server, which keeps its objects in memory until it is stopped."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5).close()
                return
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, "moto's server ended"
                time.sleep(0.05)
        raise AssertionError("moto's server does not answer")

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def options(self) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    def client(self) -> Any:
        """A file system that shares nothing with our stores, to look at the server past them."""
        import s3fs

        if self._client is None:
            options = {**self.options, "skip_instance_cache": True, "use_listings_cache": False}
            self._client = s3fs.S3FileSystem(**options)
        return self._client

    def make_bucket(self) -> str:
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().mkdir(bucket)
        return bucket


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    need("s3fs", "s3fs")
    need("moto", "moto[server]")
    need("flask", "moto[server]")
    server = S3Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_s3() -> Iterator[S3Server]:
    """One that a test may stop and start."""
    need("s3fs", "s3fs")
    need("flask", "moto[server]")
    server = S3Server()
    server.start()
    yield server
    server.stop()


class FtpServer:
    """pyftpdlib's, in a process of its own: it changes its working directory as clients do."""

    def __init__(self, folder: Path) -> None:
        self.port = _free_port()
        command = [sys.executable, "-m", "pyftpdlib", "-i", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            [*command, "-w", "-d", str(folder), "-u", "anna", "-P", "geheim"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionError:
                assert self._process.poll() is None, "the FTP server ended"
                time.sleep(0.05)
        raise AssertionError("the FTP server does not answer")

    def url(self, path: str) -> str:
        return f"ftp://anna:geheim@127.0.0.1:{self.port}/{path}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """HDFS is slow: its server comes in a package of some 200 MB."""
    for item in items:
        if "hdfs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def ftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FtpServer]:
    need("pyftpdlib", "pyftpdlib")
    server = FtpServer(tmp_path_factory.mktemp("ftp"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def hdfs_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[subprocess.Popen[str] | None]:
    """Starts meanwhile; None if it can't."""
    script = str(Path(__file__).parent / "hdfs_server.py")
    jars = Path(os.environ.get("SPARKDML_HDFS_JARS", DEFAULT_JARS))
    if not list(jars.glob("hadoop-hdfs-*.jar")):
        fetched = subprocess.run([sys.executable, script, "fetch"], check=False, timeout=300)
        if fetched.returncode:
            yield None
            return
    command = [sys.executable, script, "serve", str(jars), str(tmp_path_factory.mktemp("hdfs"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        yield server
        server.stdin.close()  # that ends it


@pytest.fixture(scope="session")
def hdfs(hdfs_process: subprocess.Popen[str] | None, spark: SparkSession) -> str:
    """The URL of a real HDFS, which took its time while Spark took its own."""
    if hdfs_process is None:
        pytest.skip(
            f"HDFS's jars are neither in {DEFAULT_JARS} nor where SPARKDML_HDFS_JARS says "
            "(python tests/checkpoint/stores/hdfs_server.py fetch)"
        )
    assert hdfs_process.stdout is not None
    port = hdfs_process.stdout.readline().strip()
    assert port, "HDFS did not start"
    return f"hdfs://127.0.0.1:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
