"""The benchmark of W1's loop runs and judges, in small; its numbers mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.loop import TITLES, table

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "loop.py"


def test_the_table_divides_within_an_epoch() -> None:
    fast = dict.fromkeys(TITLES, 1.0)
    slow = dict.fromkeys(TITLES, 3.0) | {"sparkdml": 6.0}
    ours = next(line for line in table([fast, slow]).splitlines() if "sparkdml" in line)
    assert "| 3.50 (1.00 to 6.00) | 0.75 (0.50 to 1.00) | 0.75 (0.50 to 1.00) |" in ours


@pytest.mark.slow
def test_every_loop_takes_its_turn(tmp_path: Path) -> None:
    # Rows that the two workers share unevenly, so that one has a batch more than the other.
    options = ["--epochs", "2", "--rows", "9000", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "loop.json").read_text())
    assert [set(row) for row in rows] == [set(TITLES)] * 2
    assert all(seconds > 0 for row in rows for seconds in row.values())
    assert "sparkdml, shared memory" in (tmp_path / "loop.md").read_text()
