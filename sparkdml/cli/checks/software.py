"""Checks of the driver's software: Java, pyspark, torch and pandas, in supported versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparkdml.cli.checks import Check

TESTED = (17, 21)
OLDEST = 17  # the oldest version that Spark 4 supports
INSTALL = "apt-get install openjdk-17-jre-headless"


def check_java(environment: Mapping[str, str] = os.environ) -> Check:
    command, origin = java_command(environment)
    if command is None:
        return judge_java(None, origin)
    trial = subprocess.run([command, "-version"], capture_output=True, text=True, check=False)
    # `java -version` writes to stderr; some launchers write to stdout.
    return judge_java(trial.stderr + trial.stdout, origin)


def java_command(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the java that Spark would start, and its origin: JAVA_HOME, or else the PATH."""
    home = environment.get("JAVA_HOME")
    if home:
        path = Path(home) / "bin" / "java"
        return (str(path) if os.access(path, os.X_OK) else None), f"JAVA_HOME={home}"
    path_entry = shutil.which("java", path=environment.get("PATH"))
    return path_entry, path_entry or "the PATH"


def judge_java(output: str | None, origin: str) -> Check:
    """Check the output of `java -version`, or None if there is no java."""
    if output is None:
        if origin.startswith("JAVA_HOME"):
            return Check(
                "Java", "FAIL", f"{origin} has no bin/java", "unset JAVA_HOME, or set it to a JDK"
            )
        return Check("Java", "FAIL", "no java on the PATH", INSTALL)
    version = parse_java_version(output)
    if version is None:
        said = output.strip().splitlines()[0] if output.strip() else "nothing"
        return Check("Java", "FAIL", f"{origin} answered {said!r} to -version", INSTALL)
    found = f"{version} ({origin})"
    if version < OLDEST:
        return Check(
            "Java",
            "FAIL",
            f"{found}; Spark 4 needs 17 or 21",
            f"{INSTALL}, then set JAVA_HOME to it",
        )
    if version not in TESTED:
        return Check(
            "Java", "warn", f"{found}; tested with 17 and 21", f"{INSTALL} if Spark misbehaves"
        )
    return Check("Java", "ok", found)


def parse_java_version(output: str) -> int | None:
    """Return the feature version: 8 for "1.8.0_402", 17 for "17.0.15", 21 for "21-ea"."""
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(found[1]) if found else None


SPARK_AT_LEAST, SPARK_BELOW = (4, 1), (5, 0)
SPARK_TESTED = (4, 3)
TORCH_AT_LEAST = (2, 4)


def check_packages() -> list[Check]:
    return [
        judge_pyspark(installed("pyspark")),
        judge_torch(installed("torch"), _cuda_of_torch()),
        judge_pandas(installed("pandas")),
    ]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, int]:
    """Return the major and minor version: (4, 3) for "4.3.0.dev1"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise ValueError(f"a version must start with two numbers but got {text!r}")
    return int(found[1]), int(found[2])


def judge_pyspark(found: str | None) -> Check:
    fix = "pip install 'pyspark>=4.1,<5' (on a cluster: the cluster's own Spark version)"
    if found is None:
        return Check("Spark", "FAIL", "pyspark is not installed", fix)
    if not SPARK_AT_LEAST <= release(found) < SPARK_BELOW:
        return Check("Spark", "FAIL", f"pyspark {found}; sparkdml needs 4.1 or later", fix)
    if release(found) > SPARK_TESTED:
        return Check("Spark", "warn", f"pyspark {found}; tested up to 4.3", "report what breaks")
    return Check("Spark", "ok", f"pyspark {found}")


def judge_torch(found: str | None, cuda: str | None) -> Check:
    fix = "pip install 'torch>=2.4'"
    if found is None:
        return Check("torch", "FAIL", "torch is not installed", fix)
    if release(found) < TORCH_AT_LEAST:
        return Check("torch", "FAIL", f"torch {found}; sparkdml needs 2.4 or later", fix)
    return Check("torch", "ok", f"torch {found} ({f'CUDA {cuda}' if cuda else 'CPU build'})")


def judge_pandas(found: str | None) -> Check:
    fix = "pip install 'pandas>=2.2,<3'"
    if found is None:
        return Check("pandas", "warn", "not installed: history.to_pandas() won't work", fix)
    if release(found) >= (3, 0):
        return Check("pandas", "FAIL", f"pandas {found}; pyspark 4 does not support pandas 3", fix)
    return Check("pandas", "ok", f"pandas {found}")


def _cuda_of_torch() -> str | None:
    if installed("torch") is None:
        return None
    import torch

    return torch.version.cuda
