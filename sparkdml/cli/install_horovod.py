"""`sparkdml install-horovod`: Horovod for the torch that is there, from the cache or built now.

Exit codes: 0 installed and working, 1 failed, 3 the machine can't compile (no C++ compiler, no
make, no Python headers). Scripts may take 3 as "go on with the torch backend".
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sparkdml.cli import toolchain
from sparkdml.cli.horovod_build import BuildFailed, build_wheel
from sparkdml.cli.horovod_probe import HorovodProbe, probe_horovod
from sparkdml.cli.horovod_source import HOROVOD_VERSION, RUNTIME_REQUIREMENTS
from sparkdml.cli.wheel_cache import BuildKey, WheelCache, default_cache_dir, key_of_this_machine
from sparkdml.errors import SetupError

EXIT_FAILED = 1
EXIT_CANNOT_COMPILE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="build again, whatever is installed or in the cache"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(),
        help="where built wheels are kept (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    for module, fix in (
        ("torch", "pip install torch"),
        ("pip", f"{sys.executable} -m ensurepip"),
    ):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"{module} is not installed here. Fix: {fix}, then run this again")
    import torch

    if not options.force:
        probe = probe_horovod()
        problem = unfit(probe, torch.__version__)
        if not problem:
            print(f"Horovod {probe.version} is installed and works with torch {torch.__version__}.")
            return 0
        if probe.installed:
            print(f"Horovod {probe.version} is installed but of no use here: {problem}")

    flags = toolchain.build_flags(torch.version.cuda, toolchain.nccl_can_be_built())
    if torch.version.cuda:
        print(describe_gpu_support(torch.version.cuda, flags))
    cache = WheelCache(options.cache_dir.expanduser().resolve())
    key = key_of_this_machine(HOROVOD_VERSION, flags)
    with cache.lock(key):
        if not options.force and _install_from_cache(cache, key, torch.__version__):
            return 0
        return _build_and_install(cache, key, flags, torch.__version__)


def unfit(probe: HorovodProbe, torch_version: str) -> str:
    """Why the installed Horovod can't serve this torch; empty where it can."""
    if probe.problem:
        return probe.problem
    if probe.built_for != torch_version:
        return f"it was built for torch {probe.built_for or '(unknown)'}, here is {torch_version}"
    return "" if probe.gloo else "it was built without Gloo"


def describe_gpu_support(cuda: str, flags: dict[str, str]) -> str:
    if "HOROVOD_GPU_OPERATIONS" in flags:
        return f"torch has CUDA {cuda} and NCCL is there: building with NCCL for GPU tensors."
    return (
        f"torch has CUDA {cuda}, but nvcc or nccl.h is missing: building for CPU tensors only. "
        "For GPUs install the CUDA toolkit and libnccl-dev (or set HOROVOD_NCCL_HOME), then "
        "run this with --force."
    )


def _install_from_cache(cache: WheelCache, key: BuildKey, torch_version: str) -> bool:
    wheel = cache.find(key)
    if wheel is None:
        return False
    print(f"Horovod: taking the wheel that was built before ({wheel.parent})", flush=True)
    problem = _install(wheel) or unfit(probe_horovod(), torch_version)
    if problem:
        print(f"That wheel is of no use ({problem}): building a new one.")
        cache.discard(wheel)
        return False
    print(f"Horovod {HOROVOD_VERSION} works with torch {torch_version}.")
    return True


def _build_and_install(
    cache: WheelCache, key: BuildKey, flags: dict[str, str], torch_version: str
) -> int:
    missing = toolchain.missing_tools()
    if missing:
        print("Horovod can't be built here: " + "; ".join(missing), file=sys.stderr)
        return EXIT_CANNOT_COMPILE
    started = time.monotonic()
    log_path = cache.root / f"{key.folder()}.log"
    try:
        with tempfile.TemporaryDirectory(prefix="sparkdml-horovod-") as workspace:
            # The build asks for what Horovod needs at run time, so that goes in first.
            problem = _pip_install(*RUNTIME_REQUIREMENTS)
            if problem:
                raise BuildFailed(f"installing what Horovod needs failed: {problem}")
            wheel = cache.store(key, build_wheel(flags, Path(workspace), log_path))
    except BuildFailed as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILED
    print(f"Horovod was built in {time.monotonic() - started:.0f} s; the wheel is kept: {wheel}")
    problem = _install(wheel) or unfit(probe_horovod(), torch_version)
    if problem:
        print(
            f"The new Horovod does not work: {problem}\nThe build's log: {log_path}",
            file=sys.stderr,
        )
        cache.discard(wheel)
        return EXIT_FAILED
    print(f"Horovod {HOROVOD_VERSION} works with torch {torch_version}.")
    return 0


def _install(wheel: Path) -> str:
    """Install the wheel and what it needs, never touching torch. Returns the problem, if any."""
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
    return errors[-1].strip() if errors else f"pip ended with exit code {trial.returncode}"
