"""Runs on clusters of real processes, and runs that are interrupted, in drivers of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from killed_executor_job import check_kill
from spark_home import QUICK_JVM, cluster_environment

HERE = Path(__file__).parent
JOB = str(HERE / "cluster_job.py")


def check(result):
    for answers in result["runs"].values():
        assert [rank for rank, _, _ in answers] == [0, 1]
        assert len({daemon for _, daemon, _ in answers}) == 2, "two executors, two daemons"
        assert [total for _, _, total in answers] == [3.0, 3.0]
    assert result["rows"] == result["predicted"] == 200
    assert "64 workers" in result["too_many"]
    assert "slotTimeout=1" in result["too_many"]


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory):
    """What the job found on a cluster of its own, which takes a while to start: once for all."""
    folder = tmp_path_factory.mktemp("local-cluster")
    output = folder / "result.json"
    done = subprocess.run(
        [sys.executable, JOB, str(output), "local-cluster[2,1,1024]"],
        env=cluster_environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.timeout(300)
def test_on_local_cluster(local_cluster):
    check(local_cluster)


@pytest.mark.timeout(300)
def test_a_killed_executor_leaves_no_trace_in_the_weights(local_cluster):
    """Twenty of them are killed by a slow test in tests/checkpoint."""
    check_kill(local_cluster["kill"])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_a_standalone_cluster_by_spark_submit(tmp_path):
    environment = cluster_environment(tmp_path)
    spark_class = str(Path(environment["SPARK_HOME"], "bin", "spark-class"))
    port, url = free_port(), None
    url = f"spark://127.0.0.1:{port}"
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port)]
    worker = ["org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", url]
    commands = [[*master, "--webui-port", str(free_port())]]
    commands += [[*worker, "--webui-port", str(free_port())] for _ in range(2)]
    daemons = []
    try:
        for command in commands:
            log = (tmp_path / f"daemon-{len(daemons)}.log").open("w")
            daemons.append(
                subprocess.Popen([spark_class, *command], env=environment, stdout=log, stderr=log)
            )
            time.sleep(3)
        output = tmp_path / "result.json"
        submit = str(Path(environment["SPARK_HOME"], "bin", "spark-submit"))
        done = subprocess.run(
            [submit, "--master", url, "--executor-memory", "1g", JOB, str(output)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        check(json.loads(output.read_text()))
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=20)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_gpu_that_sparks_discovery_script_named(tmp_path):
    """Without a GPU here, torch refuses the device; the address in its words is the script's."""
    script = tmp_path / "discover"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["7"]}'\n""")
    script.chmod(0o755)
    settings = {
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": script,
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
    }
    conf = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    output = tmp_path / "result.json"
    environment = cluster_environment(tmp_path)
    submit = str(Path(environment["SPARK_HOME"], "bin", "spark-submit"))
    done = subprocess.run(
        [submit, *conf, str(HERE / "gpu_job.py"), str(output)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found == ["cuda:7", "cuda:7"] or "Spark assigned GPU 7 to this task" in found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_at_a_driver_of_its_own(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "interrupted_job.py"), str(tmp_path)],
        env={**os.environ, **QUICK_JVM, "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("rank-*"))) < 2 and time.monotonic() < deadline:
            assert driver.poll() is None, driver.communicate()[0][-3000:]
            time.sleep(0.2)
        time.sleep(1)
        driver.send_signal(signal.SIGINT)
        said, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    found = tmp_path / "interrupted"
    assert found.exists(), said[-3000:]
    assert found.read_text() == "gone=True after=[0, 1]"
