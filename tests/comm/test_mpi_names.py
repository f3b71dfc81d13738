"""What MPI needs, and where: `ompi-server` at the driver, mpi4py in the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdml.comm import mpi, mpi_names
from sparkdml.comm.backends import open_communicator, resolve_backend
from sparkdml.comm.base import World
from sparkdml.errors import SetupError


@pytest.fixture
def nothing_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("nothing_on_the_path")
def test_a_driver_without_a_name_server_is_told_what_to_install() -> None:
    with pytest.raises(SetupError, match=r"ompi-server is not on the PATH.*openmpi-bin"):
        resolve_backend("mpi", 2)


@pytest.mark.usefixtures("nothing_on_the_path")
def test_a_worker_needs_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrived(Exception):
        pass

    def open_mpi(world: World) -> None:
        raise Arrived

    monkeypatch.setattr(mpi.MPICommunicator, "open", open_mpi)
    with pytest.raises(Arrived):
        open_communicator("mpi", World(0, 2, ("a", "a")))


def test_a_worker_without_mpi4py_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_names, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"mpi4py is not installed for the workers' Python"):
        mpi._initialise("a server", None)
