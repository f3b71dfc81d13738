"""Builds a wheel of Horovod: finds the tools, downloads, unpacks, patches and compiles it.

The machine's tools are a compiler, make, Python headers, CMake, and memory. Missing Python packages
(setuptools, wheel, CMake) are installed into a temporary folder, never into the user's environment.
The build writes a log.

Horovod 0.28.1 sets C++14 in its CMake files, but the headers of torch 2.1 and later need C++17.
There has been no release since, so the build changes that number in a copy of the source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import psutil

from sparkdml.cli.terminal import PercentLine
from sparkdml.errors import SetupError

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


HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What Horovod needs when it runs. Its build asks for the same ones.
RUNTIME_REQUIREMENTS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4.0")

_CMAKE_FILES = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
_CXX14 = re.compile(r"(CMAKE_CXX_STANDARD\s+)14\b")

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
_ERROR = re.compile(r"\b(error|fatal)\b", re.IGNORECASE)
_LINES_SHOWN = 10


class BuildFailed(SetupError):
    """A step of the build failed; the message has its errors, its last lines and the log's path."""


def parse_percent(line: str) -> int | None:
    """Return the percentage in a line of make's such as `[ 42%] Building …`, or None."""
    found = _PERCENT.match(line)
    return min(int(found[1]), 100) if found else None


def pinned_requirement() -> str:
    """A line for a requirements file: pip refuses an archive with another hash."""
    return f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n"


def unpack(archive: Path, into: Path) -> Path:
    """Unpack the source archive and return the folder that holds setup.py."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            target = (into / member.name).resolve()
            if not target.is_relative_to(into.resolve()) or not (member.isfile() or member.isdir()):
                raise SetupError(
                    f"{archive.name} contains {member.name!r}, which is not a regular file below "
                    "the target folder. Delete the archive and download it again."
                )
        tar.extractall(into)
    root = into / f"horovod-{HOROVOD_VERSION}"
    if not (root / "setup.py").is_file():
        raise SetupError(f"{archive.name} does not contain the source of Horovod {HOROVOD_VERSION}")
    return root


def raise_cxx_standard(text: str) -> tuple[str, int]:
    """Replace C++14 by C++17 in a CMake file's text; also return the number of replacements."""
    return _CXX14.subn(r"\g<1>17", text)


def patch(root: Path) -> None:
    """Make the unpacked source use C++17. A second call raises, as there is nothing to replace."""
    for name in _CMAKE_FILES:
        path = root / name
        text, changes = raise_cxx_standard(path.read_text())
        if not changes:
            raise SetupError(
                f"{name} of Horovod {HOROVOD_VERSION} does not set CMAKE_CXX_STANDARD 14: sparkdml"
                " can't build this source"
            )
        path.write_text(text)


def build_wheel(flags: Mapping[str, str], workspace: Path, log_path: Path) -> Path:
    """Build a wheel in `workspace`, logging the output of every step to `log_path`."""
    tools = workspace / "tools"
    environment = build_environment(os.environ, flags, tools)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w") as log:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        print("Horovod: fetching the source and the build tools …", flush=True)
        wanted = ["setuptools", "wheel", "packaging"]
        cmake = find_cmake()
        if cmake is None:
            wanted.append("cmake>=3.13,<4")
            cmake = str(tools / "cmake" / "data" / "bin" / "cmake")
        environment["HOROVOD_CMAKE"] = cmake
        _step("fetching the build tools", [*pip, "install", "--target", str(tools), *wanted], log)

        requirement = workspace / "horovod.txt"
        requirement.write_text(pinned_requirement())
        download = ["download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
        _step(
            "downloading Horovod",
            [*pip, *download, "--dest", str(workspace), "-r", str(requirement)],
            log,
            environment,
        )
        archive = workspace / f"horovod-{HOROVOD_VERSION}.tar.gz"
        root = unpack(archive, workspace / "source")
        patch(root)

        progress = PercentLine("building Horovod (about 3 minutes)")

        def show(line: str) -> None:
            percent = parse_percent(line)
            if percent is not None:
                progress.update(percent)

        progress.update(0)
        # PEP 517, because the legacy build runs `setup.py clean` after a failure, and its output
        # would hide the error.
        wheel = ["wheel", "-v", "--use-pep517", "--no-deps", "--no-build-isolation"]
        try:
            _step(
                "building Horovod",
                [*pip, *wheel, "-w", str(workspace), str(root)],
                log=log,
                environment=environment,
                watch=show,
            )
        finally:
            progress.close()
    return next(workspace.glob("horovod-*.whl"))


def build_environment(
    base: Mapping[str, str], flags: Mapping[str, str], tools: Path
) -> dict[str, str]:
    """Return the environment variables of the build."""
    # The settings of an enclosing `make` would pass its job server to a build that can't use it,
    # and the caller's HOROVOD_WITH… would change the wheel without changing its cache key.
    dropped = ("HOROVOD_WITH", "HOROVOD_GPU_OPERATIONS", "HOROVOD_CPU_OPERATIONS")
    kept = {
        name: value
        for name, value in base.items()
        if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL") and not name.startswith(dropped)
    }
    path = [str(tools), *filter(None, [base.get("PYTHONPATH", "")])]
    return {
        **kept,
        **flags,
        "PYTHONPATH": os.pathsep.join(path),
        "MAKEFLAGS": f"-j{parallel_jobs()}",
    }


def _step(
    what: str,
    command: Sequence[str],
    log: TextIO,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[str], None] | None = None,
) -> None:
    """Run one command, passing each line of its output to the log and to `watch`."""
    last: deque[str] = deque(maxlen=_LINES_SHOWN)
    errors: deque[str] = deque(maxlen=_LINES_SHOWN)
    log.write(f"$ {' '.join(command)}\n")
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                last.append(line.rstrip())
                if _ERROR.search(line):
                    errors.append(line.rstrip())
                if watch is not None:
                    watch(line)
        except BaseException:
            process.terminate()
            raise
        finally:
            log.flush()
    if process.returncode != 0:
        # The compiler's error is long before the end: the other jobs stop after it.
        shown = [f"  | {line}" for line in (*errors, "…", *last)]
        raise BuildFailed(
            f"{what} failed (exit code {process.returncode}). Its errors and last lines:\n"
            + "\n".join(shown)
            + f"\nFull log: {log.name}"
        )
