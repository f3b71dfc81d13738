"""Matrix factorisation beside ALS at its smallest, by the command that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "factorisation.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_quick_run_measures_everyone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "factorisation.json").read_text())
    assert len(found) == 5
    assert all(len(each["error"]) == len(each["seconds"]) == 1 for each in found.values())
    assert found["sparkdml, blocks"]["error"][0] < 0.8  # the ratings' own deviation is 1.4
    assert (tmp_path / "factorisation.md").read_text().count("\n") == 2 + len(found)
