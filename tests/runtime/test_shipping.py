"""sparkdml and the user's code on their way to executors that have neither: a zip, an archive."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from spark_home import cluster_environment

HERE = Path(__file__).parent
CODE = "from torch import nn\n\n\ndef make_net():\n    return nn.Linear(2, 1)\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python with everything but sparkdml: an editable install's path is not looked for there."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(home)
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "rest.pth").write_text(sysconfig.get_path("purelib"))
    python = str(home / "bin" / "python")
    found = subprocess.run(
        [python, "-c", "import sparkdml"], cwd=home, capture_output=True, check=False
    )
    if found.returncode == 0:
        pytest.skip("sparkdml is installed for good in this environment, not by its path")
    return python


def submit(tmp_path, environment, *options):
    output = tmp_path / "result.json"
    command = str(Path(environment["SPARK_HOME"], "bin", "spark-submit"))
    master = ["--master", "local-cluster[2,1,1024]"]
    done = subprocess.run(
        [command, *master, *options, str(HERE / "shipped_job.py"), str(output)],
        cwd=tmp_path,
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(output.read_text())
    assert result["rows"] == result["predicted"] == 100
    return result


def test_a_zip_by_py_files(tmp_path, bare_python):
    content = tmp_path / "content"
    shutil.copytree(HERE.parent.parent / "sparkdml", content / "sparkdml")
    (content / "shipped_code.py").write_text(CODE)
    archive = shutil.make_archive(str(tmp_path / "code"), "zip", content)
    shutil.rmtree(content)
    environment = {**cluster_environment(tmp_path), "PYSPARK_PYTHON": bare_python}
    result = submit(tmp_path, environment, "--py-files", archive)
    assert "code.zip" in result["driver"]
    for python, package, code in result["workers"]:
        assert python == bare_python
        assert "code.zip" in package
        assert "code.zip" in code


def test_an_environment_by_archives(tmp_path, bare_python):
    """As venv-pack makes it; what is large is found by its path on this machine."""
    packed = tmp_path / "packed"
    venv.create(packed)
    site = next((packed / "lib").glob("python*/site-packages"))
    # venv-pack takes a .pth for an editable install, which it refuses.
    rest = sysconfig.get_path("purelib")
    (site / "sitecustomize.py").write_text(f"import sys\n\nsys.path.append({rest!r})\n")
    shutil.copytree(HERE.parent.parent / "sparkdml", site / "sparkdml")
    (site / "shipped_code.py").write_text(CODE)
    archive = tmp_path / "environment.tar.gz"
    subprocess.run(
        [sys.executable, "-m", "venv_pack", "-q", "-p", str(packed), "-o", str(archive)], check=True
    )
    environment = {
        **cluster_environment(tmp_path),
        "PYSPARK_DRIVER_PYTHON": str(packed / "bin" / "python"),
        "PYSPARK_PYTHON": "./environment/bin/python",
    }
    result = submit(tmp_path, environment, "--archives", f"{archive}#environment")
    for python, package, code in result["workers"]:
        assert "/environment/bin/python" in python
        assert os.sep + "environment" + os.sep in package
        assert os.sep + "environment" + os.sep in code
