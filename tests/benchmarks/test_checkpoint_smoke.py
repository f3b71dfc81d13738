"""What checkpoints cost, at the smallest size, by the command that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "checkpoint.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_runs_and_states(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "checkpoint.json").read_text())
    [entry] = values["runs"]
    assert len(entry) == 5
    assert len({measured["loss"] for measured in entry.values()}) == 1, "the same run, each time"
    assert all(found[0]["count"] >= 2 for found in values["checkpoints"].values())
    assert len(values["state"]) == 2
    assert (tmp_path / "checkpoint.md").read_text().count("torch.save") >= 3
    assert not list(tmp_path.glob("checkpoint-*")), "nothing is left but data and tables"
