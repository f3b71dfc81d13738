"""The versions of Spark that the documentation names: each is installed beside the rest, and used.

Slow, and needs a package index. `SPARKDML_VENVS` names a folder in which the environments are kept
from one time to the next.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VERSIONS = ("4.0.1", "4.1.0", "4.2.0", importlib.metadata.version("pyspark"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    kept = os.environ.get("SPARKDML_VENVS")
    return Path(kept) if kept else tmp_path_factory.mktemp("venvs")


def python_with(version, folder):
    """A Python that has this pyspark, and everything else from where the tests run."""
    if version == importlib.metadata.version("pyspark"):
        return sys.executable
    home = folder / f"venv-{version}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "-q", f"pyspark=={version}"]
        subprocess.run(install, check=True, timeout=900)
        site = next((home / "lib").glob("python*/site-packages"))
        (site / "rest.pth").write_text(sysconfig.get_path("purelib"))
        (home / "ready").touch()
    return str(python)


@pytest.fixture(scope="module")
def results():
    return {}


@pytest.mark.parametrize("version", VERSIONS)
def test_small_job(version, environments, results, tmp_path):
    python = python_with(version, environments)
    done = subprocess.run(
        [python, str(HERE / "small_job.py"), str(tmp_path)],
        env={
            **{name: value for name, value in os.environ.items() if name != "SPARK_HOME"},
            "PYTHONPATH": str(HERE.parent.parent),
            "PYSPARK_PYTHON": python,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["version"] == version
    assert result["predicted"] == 200
    assert 0 < result["rows"] < 200
    assert result["checkpointed"] == result["weights"][0], "the same bits with checkpoints"
    assert result["run"] == [0, 1]
    assert sum(result["rdd"]) == 50
    assert result["warnings"] == [], "the Training tab fits this version too"
    results[version] = result["weights"]
    assert len({json.dumps(weights) for weights in results.values()}) == 1, (
        "every version of Spark gives the workers the same rows, and so the same weights"
    )
