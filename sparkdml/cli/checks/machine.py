"""Checks of the driver's machine: ports, disk space for spools, shared memory, and GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sparkdml.cli.checks import Check

_GIB = 2**30
SPOOL_FAIL_BYTES, SPOOL_WARN_BYTES = 1 * _GIB, 10 * _GIB
SHARED_MEMORY_WARN_BYTES = 256 * 2**20
SHARED_MEMORY = Path("/dev/shm")


def check_ports(environment: Mapping[str, str] = os.environ) -> Check:
    """Check that a server can listen, and be reached, at the address that workers will use."""
    name = "ports"
    host = environment.get("SPARK_LOCAL_IP") or socket.gethostname()
    fix = "export SPARK_LOCAL_IP=127.0.0.1 for local Spark, or make the host name resolvable"
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return Check(name, "FAIL", f"{host!r} can't be resolved ({error})", fix)
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(3.0)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=3.0) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"ping")
                    heard = accepted.recv(4)
    except OSError as error:
        return Check(name, "FAIL", f"can't listen or connect on {address}: {error}", fix)
    if heard != b"ping":
        return Check(name, "FAIL", f"a connection to {address} lost data", fix)
    return Check(name, "ok", f"listened and connected on {address}")


def check_spool(local_dirs: str, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Check each of Spark's local folders; the environment variable overrides the setting."""
    dirs = environment.get("SPARK_LOCAL_DIRS") or local_dirs or tempfile.gettempdir()
    return [check_spool_dir(Path(entry.strip())) for entry in dirs.split(",") if entry.strip()]


def check_spool_dir(folder: Path) -> Check:
    name = "disk for spooling"
    fix = "set spark.local.dir or SPARK_LOCAL_DIRS to a writable folder with enough space"
    # Spark creates a missing folder, so check its nearest parent.
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"spool")
    except OSError as error:
        return Check(name, "FAIL", f"{folder} can't be written to: {error.strerror}", fix)
    return judge_free_space(folder, shutil.disk_usage(nearest).free, fix)


def judge_free_space(folder: Path, free_bytes: int, fix: str) -> Check:
    found = f"{folder}: {in_units(free_bytes)} free"
    if free_bytes < SPOOL_FAIL_BYTES:
        return Check("disk for spooling", "FAIL", found, fix)
    if free_bytes < SPOOL_WARN_BYTES:
        return Check(
            "disk for spooling", "warn", f"{found}; each worker stores its rows there", fix
        )
    return Check("disk for spooling", "ok", found)


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Check:
    fix = "in a container: docker run --shm-size=1g"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Check("shared memory", "warn", f"{folder} is missing or not writable", fix)
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {in_units(free)} free"
    if free < SHARED_MEMORY_WARN_BYTES:
        return Check("shared memory", "warn", found, fix)
    return Check("shared memory", "ok", found)


def in_units(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


_CONF = "spark.task.resource.gpu.amount"


def check_gpus(conf: Mapping[str, str]) -> Check:
    """Check the GPUs that the machine has, torch can use, and Spark (`conf`) assigns to tasks."""
    import torch

    names, problem = ask_nvidia_smi()
    if problem:
        return Check("GPUs", "warn", problem, "repair the NVIDIA driver, or train on the CPU")
    return judge_gpus(
        names=names,
        torch_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        torch_cuda=torch.version.cuda,
        spark_amount=conf.get(_CONF),
    )


def ask_nvidia_smi() -> tuple[list[str], str]:
    """Return the names of the GPUs, and the problem if nvidia-smi is installed but fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], ""
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    try:
        trial = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return [], "nvidia-smi did not answer within 10 s"
    if trial.returncode != 0:
        said = (trial.stdout + trial.stderr).strip().splitlines()
        return [], f"nvidia-smi failed: {said[0] if said else f'exit code {trial.returncode}'}"
    return [line.strip() for line in trial.stdout.splitlines() if line.strip()], ""


def judge_gpus(
    names: list[str], torch_count: int, torch_cuda: str | None, spark_amount: str | None
) -> Check:
    if not names and not torch_count:
        if spark_amount:
            return Check(
                "GPUs",
                "FAIL",
                f"{_CONF}={spark_amount}, but no GPU was found",
                f"unset {_CONF}, or install the NVIDIA driver",
            )
        return Check("GPUs", "ok", "none: training runs on the CPU")
    if not torch_count:
        fix = (
            "install a CUDA build of torch"
            if torch_cuda is None
            else f"update the NVIDIA driver to one that runs CUDA {torch_cuda}"
        )
        return Check("GPUs", "warn", f"{', '.join(names)}, but torch can't use them", fix)
    found = f"{torch_count} usable by torch ({', '.join(names) or 'no nvidia-smi'})"
    if not spark_amount:
        return Check(
            "GPUs",
            "warn",
            f"{found}, but Spark assigns none to tasks",
            f"set {_CONF}=1, spark.executor.resource.gpu.amount and its discoveryScript",
        )
    return Check("GPUs", "ok", f"{found}; {_CONF}={spark_amount}")
