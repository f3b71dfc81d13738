"""Every topology and W1's loop at the smallest size, by the command that users type."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "collectives.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_topology_and_the_loop(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "collectives.md").read_text().splitlines()
    for name in ("ring", "tree", "double-tree", "halving-doubling", "hierarchical"):
        assert len([line for line in lines if line.startswith(f"| {name} |")]) == 2, name
    assert any(line.startswith("| sparkdml-torch-shared-memory |") for line in lines)
    assert any("against feed-limit" in line for line in lines)
