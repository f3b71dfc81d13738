"""The comparison with MLlib at its smallest, by the command that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "mllib_peers.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_quick_run_measures_everyone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)

    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "mllib.json").read_text())
    [entry] = values["rounds"]
    ours = {"sparkdml, ReLU", "sparkdml, logistic"}
    theirs = {"MultilayerPerceptronClassifier", "LogisticRegression"}
    assert ours | theirs <= set(entry)
    assert all(measured["rows"] == 4_000 for measured in entry.values())
    assert values["accuracies"]["sparkdml, ReLU"][0] > 0.6
    assert (tmp_path / "mllib.md").read_text().count("\n") == 2 + len(entry)
