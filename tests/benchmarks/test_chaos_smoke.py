"""The chaos at its smallest, by the command that users type, and its schedule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos_faults import BY_THE_WORKER, FROM_OUTSIDE, make_schedule

CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos.py"
KINDS = (*BY_THE_WORKER, *FROM_OUTSIDE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fault_of_each_kind_leaves_no_trace_in_the_weights(tmp_path: Path) -> None:
    chosen = ["--faults", "6", "--seed", "1", "--results", str(tmp_path)]
    command = [sys.executable, str(CHAOS), *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same, bit for bit" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    without_disk = "No full disk: mounting one was refused" in done.stdout
    kinds = {row.split(" | ")[0].removeprefix("| ") for row in rows}
    assert len(rows) == 6
    assert len(kinds) == (5 if without_disk else 6)
    assert all(float(row.split(" | ")[3]) < 10 for row in rows), "the driver knows within 10 s"


def test_each_kind_comes_in_turn_at_steps_of_its_own() -> None:
    schedule = make_schedule(13, KINDS, 4000, 125, num_workers=2, seed=3)

    assert [fault.step for fault in schedule] == sorted({fault.step for fault in schedule})
    counts = {kind: sum(fault.kind == kind for fault in schedule) for kind in KINDS}
    assert sorted(counts.values()) == [2, 2, 2, 2, 2, 3]
    assert all(fault.step < 63 for fault in schedule if fault.kind == "full disk")
    assert {fault.rank for fault in schedule} == {0, 1}


def test_a_seed_names_a_schedule() -> None:
    one, same, other = (make_schedule(8, KINDS, 2000, 125, 2, seed) for seed in (0, 0, 1))

    assert one == same
    assert one != other
