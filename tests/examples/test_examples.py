"""The examples, run as a user would run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name, folder, *arguments):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def accuracy_in(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return float(re.search(r"test accuracy: ([\d.]+)%", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_digits(tmp_path):
    assert accuracy_in(run_example("digits.py", tmp_path)) >= 96


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not Path(os.environ.get("SPARKDML_DATA", "nowhere"), "mnist").is_dir(),
    reason="SPARKDML_DATA has no mnist/",
)
def test_mnist_reaches_98_5_percent(tmp_path):
    assert accuracy_in(run_example("mnist.py", tmp_path)) >= 98.5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_resume(tmp_path):
    before = {process.pid for process in psutil.process_iter()}
    done = run_example("resume.py", tmp_path, "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].endswith("the weights are the same, bit for bit")
    submissions = [
        json.loads(path.read_text())
        for path in sorted((tmp_path / "out" / "run" / "submissions").iterdir())
    ]
    assert [s["outcome"] for s in submissions] == ["lost", "failed", "finished"]
    assert [s["reason"] for s in submissions] == ["start", "resume", "restart"]
    assert (tmp_path / "out" / "lineage.svg").read_text().startswith("<svg")
    assert not [process for process in psutil.process_iter() if is_of(process, before, tmp_path)]


def is_of(process, before, folder):
    """Whether a process was started by an example that ran in the folder."""
    try:
        return process.pid not in before and process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
