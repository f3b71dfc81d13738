"""The benchmark of inference, in small: it runs, and its table has every contender."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_quick_run_compares_all(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/inference.py", "--quick", "--rounds", "1"]
    ran = subprocess.run(
        [*command, "--results", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    table = (tmp_path / "inference.md").read_text()
    for name in ("predict_batch_udf", "pandas_udf", "mapInArrow by hand", "sparkdml transform"):
        assert f"| {name} |" in table
    assert table.count("| 16,000 |") == 1
