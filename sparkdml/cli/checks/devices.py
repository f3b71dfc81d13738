"""GPUs: what the machine has, what torch can use, what Spark hands out."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

from sparkdml.cli.checks.base import Check

_CONF = "spark.task.resource.gpu.amount"


def check_gpus(conf: Mapping[str, str]) -> Check:
    """`conf` holds the session's settings."""
    import torch

    names, problem = ask_nvidia_smi()
    if problem:
        return Check("GPUs", "warn", problem, "repair the NVIDIA driver, or go on with the CPU")
    return judge_gpus(
        names=names,
        torch_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        torch_cuda=torch.version.cuda,
        spark_amount=conf.get(_CONF),
    )


def ask_nvidia_smi() -> tuple[list[str], str]:
    """The names of the GPUs, and why they are not known where nvidia-smi is there but fails."""
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
            f"{found}, but Spark hands out none",
            f"set {_CONF}=1, spark.executor.resource.gpu.amount and its discoveryScript",
        )
    return Check("GPUs", "ok", f"{found}; {_CONF}={spark_amount}")
