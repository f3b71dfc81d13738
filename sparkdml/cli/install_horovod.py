"""`sparkdml install-horovod`: installs Horovod for the installed torch, from a cache or a build.

Exit codes: 0 if Horovod works, 1 if the build failed, 3 if this machine can't compile (no C++
compiler, make or Python headers); scripts may then use the torch backend.

Built wheels are cached in the user's home. A wheel of Horovod links against one build of torch, one
Python, one C library and one C++ ABI. All of them are in its key, so a cached wheel always matches.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparkdml.cli import horovod_build
from sparkdml.cli.horovod_build import (
    HOROVOD_VERSION,
    RUNTIME_REQUIREMENTS,
    BuildFailed,
    build_wheel,
)
from sparkdml.cli.horovod_probe import HorovodProbe, probe_horovod
from sparkdml.errors import SetupError


@dataclass(frozen=True)
class BuildKey:
    """Everything that a wheel of Horovod depends on."""

    horovod: str
    torch: str  # with its local version: 2.13.0+cpu and 2.13.0 are different builds
    python: str  # the interpreter's tag, such as cp311
    platform: str  # such as linux-x86_64
    libc: str
    cxx11_abi: bool
    flags: tuple[tuple[str, str], ...]

    def folder(self) -> str:
        """Return a readable folder name, which includes a short hash of the build flags."""
        flags = hashlib.sha256(repr(sorted(self.flags)).encode()).hexdigest()[:10]
        parts = (
            f"horovod{self.horovod}",
            f"torch{self.torch}",
            self.python,
            self.platform,
            self.libc,
            f"cxx11abi{int(self.cxx11_abi)}",
            flags,
        )
        return "-".join(re.sub(r"[^A-Za-z0-9.+_]", "_", part) for part in parts)


def key_of_this_machine(horovod: str, flags: Mapping[str, str]) -> BuildKey:
    import torch

    return BuildKey(
        horovod=horovod,
        torch=torch.__version__,
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        platform=sysconfig.get_platform(),
        libc="".join(platform.libc_ver()) or "libc",
        cxx11_abi=torch.compiled_with_cxx11_abi(),
        flags=tuple(sorted(flags.items())),
    )


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `$XDG_CACHE_HOME/sparkdml/wheels`, or `~/.cache/sparkdml/wheels` if it isn't set."""
    # As XDG specifies, a relative path counts as not set.
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(environment.get("HOME") or Path.home()) / ".cache"
    return base / "sparkdml" / "wheels"


class WheelCache:
    """One folder for each key, with one wheel in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: BuildKey) -> Path | None:
        wheels = sorted((self.root / key.folder()).glob("*.whl"))
        return wheels[-1] if wheels else None

    def store(self, key: BuildKey, wheel: Path) -> Path:
        """Copy a wheel into the cache atomically."""
        folder = self.root / key.folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{wheel.name}.{os.getpid()}.partial"
        try:
            shutil.copyfile(wheel, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, folder / wheel.name)
        finally:
            partial.unlink(missing_ok=True)
        return folder / wheel.name

    def discard(self, wheel: Path) -> None:
        wheel.unlink(missing_ok=True)

    @contextmanager
    def lock(self, key: BuildKey) -> Iterator[None]:
        """Lock out other builds of the same wheel; they wait and then find it in the cache."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / f"{key.folder()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


EXIT_FAILED = 1
EXIT_CANNOT_COMPILE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="rebuild, even if Horovod is installed or cached"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        help="folder for built wheels (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    for module, fix in (
        ("torch", "pip install torch"),
        ("pip", f"{sys.executable} -m ensurepip"),
    ):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"{module} is not installed. Run `{fix}`, then run this again")
    import torch

    if not options.force:
        probe = probe_horovod()
        problem = unfit(probe, torch.__version__)
        if not problem:
            print(f"Horovod {probe.version} is installed and works with torch {torch.__version__}.")
            return 0
        if probe.installed:
            print(f"Horovod {probe.version} is installed but does not work: {problem}")

    flags = horovod_build.build_flags(torch.version.cuda, horovod_build.nccl_can_be_built())
    if torch.version.cuda:
        print(describe_gpu_support(torch.version.cuda, flags))
    cache = WheelCache(options.cache_dir.expanduser().resolve())
    key = key_of_this_machine(HOROVOD_VERSION, flags)
    with cache.lock(key):
        if not options.force and _install_from_cache(cache, key, torch.__version__):
            return 0
        return _build_and_install(cache, key, flags, torch.__version__)


def unfit(probe: HorovodProbe, torch_version: str) -> str:
    """Return why the installed Horovod can't be used with this torch, or an empty string."""
    if probe.problem:
        return probe.problem
    if probe.built_for != torch_version:
        return f"it was built for torch {probe.built_for or '(unknown)'}, not {torch_version}"
    return "" if probe.gloo else "it was built without Gloo"


def describe_gpu_support(cuda: str, flags: dict[str, str]) -> str:
    if "HOROVOD_GPU_OPERATIONS" in flags:
        return f"torch has CUDA {cuda} and NCCL was found: building with NCCL for GPU tensors."
    return (
        f"torch has CUDA {cuda}, but nvcc or nccl.h is missing: building for CPU tensors only. "
        "For GPUs install the CUDA toolkit and libnccl-dev (or set HOROVOD_NCCL_HOME), then "
        "run this with --force."
    )


def _install_from_cache(cache: WheelCache, key: BuildKey, torch_version: str) -> bool:
    wheel = cache.find(key)
    if wheel is None:
        return False
    print(f"Horovod: using the cached wheel ({wheel.parent})", flush=True)
    problem = _install(wheel) or unfit(probe_horovod(), torch_version)
    if problem:
        print(f"The cached wheel does not work ({problem}); rebuilding it.")
        cache.discard(wheel)
        return False
    print(f"Horovod {HOROVOD_VERSION} works with torch {torch_version}.")
    return True


def _build_and_install(
    cache: WheelCache, key: BuildKey, flags: dict[str, str], torch_version: str
) -> int:
    missing = horovod_build.missing_tools()
    if missing:
        print("Horovod can't be built on this machine: " + "; ".join(missing), file=sys.stderr)
        return EXIT_CANNOT_COMPILE
    started = time.monotonic()
    log_path = cache.root / f"{key.folder()}.log"
    try:
        with tempfile.TemporaryDirectory(prefix="sparkdml-horovod-") as workspace:
            # Horovod's build imports its run-time requirements, so install them first.
            problem = _pip_install(*RUNTIME_REQUIREMENTS)
            if problem:
                raise BuildFailed(f"installing Horovod's requirements failed: {problem}")
            wheel = cache.store(key, build_wheel(flags, Path(workspace), log_path))
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILED
    print(f"Horovod was built in {time.monotonic() - started:.0f} s; wheel: {wheel}")
    problem = _install(wheel) or unfit(probe_horovod(), torch_version)
    if problem:
        print(
            f"The new build of Horovod does not work: {problem}\nBuild log: {log_path}",
            file=sys.stderr,
        )
        cache.discard(wheel)
        return EXIT_FAILED
    print(f"Horovod {HOROVOD_VERSION} works with torch {torch_version}.")
    return 0


def _install(wheel: Path) -> str:
    """Install the wheel and its requirements, but never torch. Return the error, or ''."""
    return _pip_install(*RUNTIME_REQUIREMENTS) or _pip_install(
        "--no-deps", "--force-reinstall", str(wheel)
    )


def _pip_install(*arguments: str) -> str:
    trial = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if trial.returncode == 0:
        return ""
    lines = [line for line in trial.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line] or lines
    return errors[-1].strip() if errors else f"pip exited with code {trial.returncode}"
