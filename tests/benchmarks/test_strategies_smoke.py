"""The comparisons of strategies and of matrix products at their smallest, as users type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SPARKDML_DATA"}
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_strategies_on_a_few_digits(tmp_path: Path) -> None:
    chosen = ["--only", "ring", "OneBit", "LayeredSGD(2)"]
    done = run("strategies.py", "--epochs", "1", *chosen, "--results", str(tmp_path))

    assert "| OneBit |" in done.stdout, done.stdout + done.stderr
    rows = json.loads((tmp_path / "strategies.json").read_text())
    names = ["AllReduce", "ring", "OneBit", "LayeredSGD(2)", "single process"]
    assert [row["strategy"] for row in rows] == names
    assert not any(row["error"] for row in rows)
    sent = {row["strategy"]: row["sent_megabytes"] for row in rows}
    # By default AllReduce writes each number once, into memory that all read: less than by wire.
    assert 0 < sent["OneBit"] < sent["ring"] / 10


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_products_equal_numpys_and_block_matrices(tmp_path: Path) -> None:
    sizes = ["--outer", "60", "--inner", "200", "--block", "50", "--rounds", "1"]
    done = run("matmul.py", *sizes, "--results", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    taken = json.loads((tmp_path / "matmul.json").read_text())
    assert {"sparkdml", "BlockMatrix", "BlockMatrix, blocks cached"} <= set(taken)
