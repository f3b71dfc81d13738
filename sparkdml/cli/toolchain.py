"""The machine's tools for building Horovod: compiler, make, Python headers, CMake, memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import psutil

CMAKE_AT_LEAST = (3, 13)
CMAKE_BELOW = (4,)  # CMake 4 rejects the old policies that Horovod's Gloo uses

# The largest of torch's translation units takes a bit over 1 GB in g++.
_BYTES_PER_JOB = 1.5 * 2**30


def missing_tools(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what is missing for compiling a torch extension, each with its fix."""
    missing = []
    if find_compiler(environment) is None:
        missing.append("no C++17 compiler was found. Fix: apt-get install g++")
    if shutil.which("make", path=environment.get("PATH")) is None:
        missing.append("make was not found. Fix: apt-get install make")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        missing.append(f"Python's headers were not found. Fix: apt-get install {python}-dev")
    return missing


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Find the first C++ compiler that accepts C++17: $CXX, then the usual names."""
    for name in (environment.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name, path=environment.get("PATH"))):
            command = [path, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"]
            # Include a library header: a compiler may be installed without libstdc++'s headers.
            trial = subprocess.run(
                command, input=b"#include <optional>\n", capture_output=True, check=False
            )
            if trial.returncode == 0:
                return path
    return None


def parse_cmake_version(output: str) -> tuple[int, ...] | None:
    found = re.search(r"cmake version (\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else None


def cmake_fits(version: tuple[int, ...] | None) -> bool:
    return version is not None and CMAKE_AT_LEAST <= version < CMAKE_BELOW


def find_cmake() -> str | None:
    """Return the path of CMake if its version is supported."""
    path = shutil.which("cmake")
    if path is None:
        return None
    trial = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return path if cmake_fits(parse_cmake_version(trial.stdout)) else None


def parallel_jobs() -> int:
    """Return the number of build jobs: one per core, limited by the free memory."""
    affordable = int(psutil.virtual_memory().available // _BYTES_PER_JOB)
    return max(1, min(len(os.sched_getaffinity(0)), affordable))


def build_flags(cuda: str | None, nccl: bool) -> dict[str, str]:
    """Return Horovod's build settings: torch only, Gloo on CPUs, NCCL on GPUs if possible."""
    flags = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
    }
    if cuda and nccl:
        flags["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return flags


def nccl_can_be_built(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Horovod's CMake files will find the CUDA compiler and NCCL's header."""
    cuda_home = environment.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=environment.get("PATH")) or shutil.which(
        "nvcc", path=f"{cuda_home}/bin"
    )
    places = [
        environment.get("HOROVOD_NCCL_INCLUDE", ""),
        f"{environment['HOROVOD_NCCL_HOME']}/include" if "HOROVOD_NCCL_HOME" in environment else "",
        f"{cuda_home}/include",
        "/usr/include",
    ]
    return nvcc is not None and any((Path(p) / "nccl.h").is_file() for p in places if p)
