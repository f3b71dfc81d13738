"""Tests the installed Horovod in a child process.

A broken extension can crash the process that imports it, so neither `doctor` nor `install-horovod`
imports Horovod itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

_SCRIPT = """
import json, importlib.metadata, pathlib
found = {"version": importlib.metadata.version("horovod")}
import torch
import horovod
metadata = pathlib.Path(horovod.__file__).with_name("metadata.json")
if metadata.is_file():
    found["built_for"] = json.loads(metadata.read_text()).get("pytorch")
import horovod.torch as hvd
found["gloo"], found["nccl"] = bool(hvd.gloo_built()), bool(hvd.nccl_built())
hvd.init()
total = hvd.allreduce(torch.arange(4.0), op=hvd.Sum)
assert hvd.size() == 1 and total.tolist() == [0.0, 1.0, 2.0, 3.0]
hvd.shutdown()
found["torch"] = torch.__version__
print(json.dumps(found))
"""


@dataclass(frozen=True)
class HorovodProbe:
    """The result of a probe; `problem` is empty if import and init with one process worked."""

    version: str = ""
    built_for: str = ""  # the torch version at build time
    gloo: bool = False
    nccl: bool = False
    problem: str = ""

    @property
    def installed(self) -> bool:
        return bool(self.version)


def probe_horovod(timeout_seconds: float = 60.0) -> HorovodProbe:
    present = _installed_version()
    if not present:
        return HorovodProbe(problem="not installed")
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**without_launcher(os.environ), "HOROVOD_CONTROLLER": "gloo"},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return HorovodProbe(present, problem=f"import and init took over {timeout_seconds:.0f} s")
    if trial.returncode != 0:
        return HorovodProbe(present, problem=_last_line(trial.stderr, trial.returncode))
    found = json.loads(trial.stdout.strip().splitlines()[-1])
    return HorovodProbe(
        version=found["version"],
        built_for=found.get("built_for") or "",
        gloo=found["gloo"],
        nccl=found["nccl"],
    )


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without an enclosing launcher's variables, which name its world."""
    launchers = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_")
    return {name: v for name, v in environment.items() if not name.startswith(launchers)}


def _installed_version() -> str:
    try:
        return version("horovod")
    except PackageNotFoundError:
        return ""


def _last_line(stderr: str, returncode: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if returncode < 0:
        return f"the process was killed by signal {-returncode}"
    return lines[-1] if lines else f"the process exited with code {returncode}"
