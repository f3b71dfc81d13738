"""From names to communicators."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdml.comm import backends
from sparkdml.comm.backends import open_communicator, resolve_backend, why_no_horovod
from sparkdml.comm.base import World
from sparkdml.comm.single import SingleCommunicator
from sparkdml.errors import ParameterError, SetupError


def test_auto_prefers_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_no_horovod", lambda: None)
    assert resolve_backend("auto") == "horovod"
    assert resolve_backend("auto", 2) == "horovod"
    assert resolve_backend("auto", 1) == "single"


def test_auto_is_torch_without_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "why_no_horovod", lambda: "not installed")
    assert resolve_backend("auto", 2) == "torch"
    with pytest.raises(SetupError, match=r"not installed.*install-horovod"):
        resolve_backend("horovod")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"backend must be one of auto, horovod.*'pigeons'"):
        resolve_backend("pigeons")


def test_single_is_for_one_worker() -> None:
    world = World(0, 2, ("a", "a"))
    with pytest.raises(ParameterError, match="2 workers"):
        open_communicator("single", world)


def test_one_worker_needs_no_stores() -> None:
    assert isinstance(open_communicator("auto", World(0, 1, ("a",))), SingleCommunicator)


def test_horovod_built_without_torch_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(backends, "find_spec", lambda _name: Spec)
    assert why_no_horovod() == "horovod is installed but was built without torch"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    assert why_no_horovod() is None
    monkeypatch.setattr(backends, "find_spec", lambda _name: None)
    assert why_no_horovod() == "the package horovod is not installed"
