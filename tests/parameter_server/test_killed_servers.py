"""Servers and workers killed with -9, mid-epoch, on `local-cluster`: what the servers hold is what
the workers heard acknowledged, push by push.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parent))
from killed_servers_job import CASES, EPOCHS, ROWS
from spark_home import cluster_environment

from sparkdml.parameter_server.wire.frames import Status

JOB = str(Path(__file__).parent / "killed_servers_job.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One session with four executors of one slot each: two servers, two workers."""
    folder = tmp_path_factory.mktemp("killed-servers")
    output = folder / "result.json"
    done = subprocess.run(
        [sys.executable, JOB, str(output), "local-cluster[4,1,1024]"],
        env=cluster_environment(folder),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.checkpoint])
def test_both_sides_count_the_same_acknowledged_pushes(runs, name):
    run, victims = runs[name], CASES[name].victims
    assert run["killed"] == [f"killed-{who}" for who in sorted(victims)]
    assert ("acknowledged-1-1" in run["attempts"]) == ("worker" in victims), (
        "Spark started it again"
    )
    # Each was taken; restarted workers repeated their last step, which the servers ignored.
    repeated = [Status.REPEATED] if "worker" in victims else []
    assert run["statuses"] == [Status.OK, *repeated]
    assert run["held_alike"]
    assert run["held"] == run["acknowledged"]
    # The worker died between two steps, so that the count is also that of the rows.
    assert set(run["acknowledged"]) == {ROWS * EPOCHS}
    assert run["rows"] == [ROWS] * EPOCHS


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.checkpoint])
def test_from_a_checkpoint_each_row_counts_once(runs, name):
    """What was pushed behind the checkpoint is gone with it, and is pushed once more."""
    run = runs[name]
    assert run["killed"] == [f"killed-{who}" for who in sorted(CASES[name].victims)]
    assert run["held_alike"]
    assert set(run["held"]) == {ROWS * EPOCHS}
    assert set(run["acknowledged"]) != {ROWS * EPOCHS}
    assert run["rows"] == [ROWS] * EPOCHS
