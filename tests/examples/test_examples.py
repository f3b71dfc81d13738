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


def run_example(name, folder, *arguments, data=True):
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    if not data:
        environment.pop("SPARKDML_DATA", None)
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env=environment,
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
def test_mnist_on_a_standalone_cluster_of_its_own(tmp_path):
    before = {process.pid for process in psutil.process_iter()}
    script = str(EXAMPLES / "mnist.py")
    done = run_example("standalone_cluster.py", tmp_path, script, "--epochs", "6", data=False)
    assert accuracy_in(done) >= 80
    assert not [process for process in psutil.process_iter() if is_of(process, before, tmp_path)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_ends_when_its_script_fails(tmp_path):
    before = {process.pid for process in psutil.process_iter()}
    script = tmp_path / "wrong.py"
    script.write_text("raise SystemExit(3)")
    assert run_example("standalone_cluster.py", tmp_path, str(script)).returncode != 0
    assert not [process for process in psutil.process_iter() if is_of(process, before, tmp_path)]


SAYS = {
    "movielens.py": r"root mean square error: (0|1\.0)\.?\d* stars",
    "shakespeare.py": r"The .*\n",
    "pipeline.py": r"test accuracy: (8|9|10)\d(\.\d)?%",
    "autoencoder.py": r"broken ones are among them",
    "topics.py": r"topic 3: \w+ \w+",
    "compare_strategies.py": r"AllReduce\(\)[^$]*\nsingle process +1 +[\d.]+",
    "extending/strategy.py": r"PostLocalSGD\(.*\): \d+ sums .*, (9\d|8[5-9])\.\d% right",
    "extending/callback.py": r"epoch  6: noise scale +\d+ rows",
    "extending/compression.py": r"RandomBlock\(fraction=0.25\): training accuracy (9\d|100)\.\d%",
    "streaming.py": r"went on learning: +[789]\d\.\d%",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAYS)
def test_as_a_script(name, tmp_path):
    done = run_example(name, tmp_path, data=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(SAYS[name], done.stdout), done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not Path(os.environ.get("SPARKDML_DATA", "nowhere"), "movielens-100k").is_dir(),
    reason="SPARKDML_DATA has no movielens-100k/",
)
def test_movielens_is_within_a_star(tmp_path):
    done = run_example("movielens.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.search(r"error: ([\d.]+) stars", done.stdout)[1]) < 0.98


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not Path(os.environ.get("SPARKDML_DATA", "nowhere"), "tinyshakespeare").is_dir(),
    reason="SPARKDML_DATA has no tinyshakespeare/",
)
def test_shakespeare_learns_from_the_file(tmp_path):
    done = run_example("shakespeare.py", tmp_path, "--epochs", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.search(r"'loss': ([\d.]+)", done.stdout)[1]) < 2.6


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
