"""Executors and drivers that are killed with -9, in sessions of their own: the same bits.

One killed executor is among what tests/runtime/test_clusters.py does on its cluster.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import sparkdml as dml

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
sys.path.insert(0, str(Path(__file__).parent))
from killed_executor_job import check_kill
from small_run import equal, make_estimator
from spark_home import QUICK_JVM, cluster_environment

HERE = Path(__file__).parent


def kill_executors(folder, count, timeout):
    """The outcomes of the runs, in each of which one executor was killed."""
    output = folder / "kills.json"
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "killed_executor_job.py"),
            str(output),
            "local-cluster[2,1,1024]",
            str(count),
        ],
        env=cluster_environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


def check(kills, count):
    assert len(kills) == count
    for kill in kills:
        check_kill(kill)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_killed_executors_leave_no_trace_in_the_weights(tmp_path):
    check(kill_executors(tmp_path, 20, timeout=880), 20)


def run_driver(folder, step):
    local = folder / "local"
    local.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(HERE / "driver_job.py"), str(folder), str(step)],
        env={
            **os.environ,
            **QUICK_JVM,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(local),
            "TMPDIR": str(local),  # who is killed can't remove what it has there
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def processes_of(folder):
    """The Python workers, their daemon and the JVM, as they were before the driver was killed."""
    files = sorted(folder.glob("pids-*.json"))
    assert len(files) == 2, "both ranks have noted down who they are"
    return {pid for file in files for pid in json.loads(file.read_text())}


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(lives, pids)):
        time.sleep(0.1)
    return [psutil.Process(pid).cmdline() for pid in pids if lives(pid)]


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class KillsDriver(dml.Callback):
    """In the place of the killed driver's own, by its name; this driver is to live."""

    def __repr__(self):
        return "KillsDriver()"


@pytest.mark.timeout(200)
def test_a_new_driver_finishes_what_a_killed_one_began(rows, uninterrupted, tmp_path):
    killed = run_driver(tmp_path, step=30)  # in the middle of the second of three epochs
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    pids = processes_of(tmp_path)
    assert len(pids) >= 4, "two workers, a daemon, the JVM"
    assert not wait_until_gone(pids, seconds=15), "no process is left behind"
    assert not list((tmp_path / "local").rglob("sparkdml-spool-*")), "nor are the rows"

    checkpoints = dml.Checkpoints(f"file:{tmp_path}/run", every=4)
    fitted = make_estimator(
        optimizer="adam", checkpoint=checkpoints, callbacks=[KillsDriver()]
    ).fit(rows)
    expected = uninterrupted(optimizer="adam")
    assert equal(fitted, expected)
    assert [row["loss"] for row in fitted.history] == [row["loss"] for row in expected.history]
    first, second = checkpoints.lineage().submissions
    assert (first.outcome, second.outcome) == ("lost", "finished")
    assert (first.reason, second.reason) == ("start", "resume")
    assert 0 < int(second.resumed_from.split("-")[0]) < 30, "in the middle of an epoch"
