"""The whole benchmark at its smallest: every contender, by the command that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers.py"


def run_peers(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_measures_everyone_who_is_installed(tmp_path: Path) -> None:
    chosen = ["--workloads", "W1-steady,W4", "--rounds", "1", "--timeout", "120"]
    done = run_peers("--quick", *chosen, "--results", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "peers.json").read_text())
    assert values["failures"] == []
    took_part = set(values["rounds"]["W1-steady"][0])
    assert {"sparkdml-torch", "torchrun", "limit"} <= took_part | set(values["skipped"])
    losses = {entry["loss"] for entry in values["rounds"]["W1-steady"][0].values()}
    # Same model, same data, same number of steps: only the order of the rows differs.
    assert max(losses) - min(losses) < 0.02
    assert "## Aims" in (tmp_path / "peers.md").read_text()
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_an_unknown_contender_is_refused_with_the_known_ones() -> None:
    done = run_peers("--contenders", "unknown")

    assert done.returncode == 2
    assert "must be among sparkdml-torch, sparkdml-horovod, torchrun" in done.stderr
    assert "['unknown']" in done.stderr
