"""Open MPI's name server, a child process of the driver, through which Spark's tasks connect.

`mpirun` can't start Spark's tasks, so each task initialises MPI on its own, and they are joined
afterwards with MPI_Comm_accept and MPI_Comm_connect, which need Open MPI's `ompi-server`. A process
initialises MPI only once, and Spark reuses its Python processes: so one server runs for the whole
life of the driver, not one per run.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from sparkdml.errors import SetupError

START_SECONDS = 20.0
SERVER_KEY = "sparkdml/mpi-server"  # in the driver's store: the server's address
INSTALL_MPI = "Install Open MPI 4 (on Debian openmpi-bin) and mpi4py, or choose backend='torch'."

_starting = threading.Lock()
_server: NameServer | None = None


def why_no_mpi() -> str | None:
    """Return None if a worker can use MPI here, else the reason; imports nothing."""
    if find_spec("mpi4py") is None:
        return "the package mpi4py is not installed for the workers' Python"
    return None


def why_no_name_server() -> str | None:
    """Return None if a driver can serve MPI here, else the reason; it needs no mpi4py."""
    if shutil.which("ompi-server") is None:
        return "Open MPI's ompi-server is not on the PATH"
    return None


def name_server(interface: str | None) -> str:
    """Return the address of this driver's name server, after starting it if necessary."""
    global _server
    with _starting:
        if _server is None or not _server.is_running:
            _server = NameServer(interface)
            atexit.register(_server.close)
        return _server.address


class NameServer:
    """A child process that listens on one interface and ends with the driver."""

    def __init__(self, interface: str | None) -> None:
        reason = why_no_name_server()
        if reason is not None:
            raise SetupError(f"backend='mpi' can't be used: {reason}. {INSTALL_MPI}")
        with tempfile.TemporaryDirectory(prefix="sparkdml-mpi-") as folder:
            place = Path(folder, "address")
            self._process = subprocess.Popen(
                ["ompi-server", "--no-daemonize", "--report-uri", str(place)],
                env={**os.environ, **open_mpi_settings(interface)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                self.address = self._wait_for(place)
            except BaseException:
                self.close()
                raise

    def _wait_for(self, place: Path) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if place.exists() and (written := place.read_text()).endswith("\n"):
                return written.strip()
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise SetupError(f"ompi-server did not start within {START_SECONDS:g} s. {INSTALL_MPI}")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self.is_running:
            self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def open_mpi_settings(interface: str | None) -> dict[str, str]:
    """Return the settings that restrict Open MPI to one interface."""
    if interface is None:
        return {}
    return {"OMPI_MCA_oob_tcp_if_include": interface, "OMPI_MCA_btl_tcp_if_include": interface}
