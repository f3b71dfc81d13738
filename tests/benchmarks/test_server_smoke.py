"""What the servers' wire costs, at the smallest size, by the command that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "server.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_the_wire_and_more_workers(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "server.json").read_text())
    [entry] = values["rounds"]
    assert len(entry) == 5
    assert all(measured["seconds"]["push and pull"] > 0 for measured in entry.values())
    assert [count for count, _ in values["workers"]] == [1, 2]
    assert "ratio to the socket" in (tmp_path / "server.md").read_text()
