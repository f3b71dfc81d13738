"""The Python packages at the driver: pyspark, torch and pandas, with the versions that fit."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from sparkdml.cli.checks.base import Check

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
    """Major and minor: (4, 3) for "4.3.0.dev1"."""
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
