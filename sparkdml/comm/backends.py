"""Backends by name: checks if one is available, and opens its communicator in a worker."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from sparkdml.comm.base import Communicator, World
from sparkdml.errors import ParameterError, SetupError

Backend = Literal["auto", "horovod", "torch", "mpi", "single"]
BACKENDS: tuple[str, ...] = get_args(Backend)

_INSTALL_HOROVOD = "Run `sparkdml install-horovod`, or choose backend='torch'."


def why_no_horovod() -> str | None:
    """Return None if Horovod is installed and built for torch, else the reason; imports nothing."""
    spec = find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return "the package horovod is not installed"
    folders = [Path(place) / "torch" for place in spec.submodule_search_locations]
    if not any(list(folder.glob("mpi_lib_v2*")) for folder in folders):
        return "horovod is installed but was built without torch"
    return None


def horovod_available() -> bool:
    return why_no_horovod() is None


def resolve_backend(name: str, size: int | None = None) -> str:
    """Resolve a backend's name in the driver, once for all workers.

    `auto` is `single` for one worker, else Horovod if it is installed, else torch.
    """
    if name not in BACKENDS:
        raise ParameterError("backend", name, f"one of {', '.join(BACKENDS)}")
    if name == "auto":
        if size == 1:
            return "single"
        return "horovod" if horovod_available() else "torch"
    if name == "single" and size is not None and size != 1:
        allowed = f"auto, horovod, torch or mpi for {size} workers"
        raise ParameterError("backend", name, allowed, "'single' is for one worker.")
    if name == "horovod":
        reason = why_no_horovod()
        if reason is not None:
            raise SetupError(f"backend='horovod' can't be used: {reason}. {_INSTALL_HOROVOD}")
    if name == "mpi":
        from sparkdml.comm.mpi_names import INSTALL_MPI, why_no_name_server

        reason = why_no_name_server()
        if reason is not None:
            raise SetupError(f"backend='mpi' can't be used: {reason}. {INSTALL_MPI}")
    return name


def open_communicator(backend: str, world: World) -> Communicator:
    """Open this rank's communicator; every rank of the world calls it with the same backend."""
    # The driver's requirements for MPI are not checked here: workers need not have them.
    resolved = backend if backend == "mpi" else resolve_backend(backend, world.size)
    # Each backend is imported only when used: Horovod may be missing, and torch imports slowly.
    if resolved == "horovod":
        from sparkdml.comm.horovod import HorovodCommunicator

        return HorovodCommunicator.open(world)
    if resolved == "torch":
        from sparkdml.comm.torch import TorchCommunicator

        return TorchCommunicator.open(world)
    if resolved == "mpi":
        from sparkdml.comm.mpi import MPICommunicator

        return MPICommunicator.open(world)
    from sparkdml.comm.single import SingleCommunicator

    return SingleCommunicator()
