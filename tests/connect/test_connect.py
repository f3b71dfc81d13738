"""Spark Connect, with a server that pyspark starts: classic sessions and these don't mix in one
process, so that everything happens in another, and is judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("connect")
    output = folder / "result.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "connect_job.py"), str(output), str(folder)],
        env={
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


def part(found, name):
    assert "failed" not in found[name], found[name]["failed"]
    return found[name]


def test_fit_transform_evaluate_save_and_load(found):
    result = part(found, "fit_and_use")
    assert result["rows"] == result["predicted"] == 200
    assert result["losses"][-1] < result["losses"][0]
    assert result["evaluated"]["loss"] < result["losses"][0]
    assert result["loaded_alike"]
    assert result["overwrite"][0] == "OSError"
    assert "already exists" in result["overwrite"][1]


def test_what_needs_a_classic_session_is_told_in_one_line(found):
    said = [line for line in part(found, "fit_and_use")["warnings"] if "Training tab" in line]
    assert len(said) == 1
    assert "Spark Connect" in said[0]


def test_run_with_and_without_data(found):
    result = part(found, "run_with_data")
    assert result["rows"] == [[0, 200.0], [1, 200.0]]
    assert result["none"] == [2, 2]


def test_checkpoints_on_a_shared_disk(found):
    whole, again = part(found, "checkpointed")
    assert whole == again


def test_large_models_go_beside_grpc(found):
    """A message of gRPC may have 128 MB at most."""
    result = part(found, "large_model")
    assert result == {"moved": True, "num_bytes": 200_000_000}


def test_interrupted_jobs_leave_no_worker(found):
    assert part(found, "after_a_failure") == [0, 1]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("no workers", "ParameterError", "Pass numWorkers="),
        ("too many", "NotEnoughSlots", "9 workers"),
        ("nulls", "DataError", "column 'label' is null in the row"),
        ("no rows", "DataError", "no rows"),
        ("in a worker", "WorkerError", "from rank 1"),
        ("gpu", "SetupError", "spark.task.resource.gpu.amount"),
        ("hdfs", "ParameterError", "use a classic Spark session"),
        ("save to hdfs", "SetupError", "classic session"),
        ("rdd", "ParameterError", "a DataFrame, an RDD or None"),
        ("not ours", "SetupError", "can't listen on '192.0.2.77'"),
        ("unreachable", "SetupError", "workers can't reach this process, the Spark Connect client"),
    ],
)
def test_errors(found, case, kind, words):
    got_kind, message = part(found, "errors")[case]
    assert got_kind == kind
    assert words in message
