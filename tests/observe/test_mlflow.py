"""MLflow, against a server that really runs."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparkdml.errors import SparkDMLError
from sparkdml.observe.trackers import MLflow, TrackerObserver, find_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROW = {"epoch": 1.0, "loss": 0.25, "top@5": 0.5, "rows": 100.0, "rows_per_second": 50.0}
START_SECONDS = 90


def server_command():
    """Of this environment, or of another one: the server pins much that a client needs not."""
    named = os.environ.get("SPARKDML_MLFLOW")
    if named and Path(named).exists():
        return named
    beside = Path(sys.executable).parent / "mlflow"
    if find_spec("alembic") is None:
        return None
    return str(beside) if beside.exists() else shutil.which("mlflow")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("mlflow", reason="the extra sparkdml[mlflow] is not installed")
    command = server_command()
    if command is None:
        pytest.skip("there is no MLflow server: pip install mlflow, or set SPARKDML_MLFLOW")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    store = ["--backend-store-uri", "sqlite:///runs.db", "--artifacts-destination", "artifacts"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                command,
                "server",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--workers",
                "1",
                *store,
            ],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(uri, process, folder / "log")
        yield uri
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(20)


def wait_for(uri, process, log):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"the MLflow server did not start:\n{log.read_text()[-3000:]}")


def client(uri):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def only_run(uri, experiment):
    (run,) = client(uri).search_runs([find_experiment(client(uri), experiment)])
    return run


def feed(settings, *events):
    observer = TrackerObserver(settings)
    for rank, event in events:
        observer.handle(rank, event)
    observer.close()


def test_a_run_with_its_params_and_metrics(server):
    start = {"kind": "run-start", "run": "7f", "name": "fit Net", "workers": 2, "epochs": 3}
    losses = [[4, 0.5]]
    feed(
        MLflow(server, "numbers", tags={"team": "a"}),
        (-1, {**start, "plan": {"model": "Net" * 999, "empty": ""}}),
        (0, {"kind": "steps", "epoch": 1, "step": 4, "losses": losses, "loss": 0.5, "time": 1.0}),
        (0, {"kind": "epoch", "row": ROW}),
        (0, {"kind": "log", "values": {"bad": float("nan")}}),
        (-1, {"kind": "run-end", "outcome": "finished", "cause": None}),
    )
    run = only_run(server, "numbers")
    assert (run.info.run_name, run.info.status) == ("fit Net", "FINISHED")
    assert run.data.metrics["loss"] == 0.25
    assert run.data.metrics["top_5"] == 0.5
    assert run.data.params["workers"] == "2"
    assert run.data.params["plan.model"].startswith("NetNet")
    assert {"team": "a", "sparkdml.run": "7f"}.items() <= run.data.tags.items()
    (point,) = client(server).get_metric_history(run.info.run_id, "step_loss")
    assert (point.step, point.value) == (4, 0.5)


def test_a_run_that_failed(server):
    start = {"kind": "run-start", "run": "80", "name": "fit Net"}
    end = {"kind": "run-end", "outcome": "failed", "cause": "rank 1 on b failed"}
    feed(MLflow(server, "failures"), (-1, start), (-1, end))
    run = only_run(server, "failures")
    assert run.info.status == "FAILED"
    assert run.data.tags["sparkdml.cause"] == "rank 1 on b failed"


def test_a_server_that_is_not_there(monkeypatch):
    pytest.importorskip("mlflow", reason="the extra sparkdml[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    observer = TrackerObserver(MLflow("http://127.0.0.1:9", "nowhere"))
    began = time.monotonic()
    observer.handle(-1, {"kind": "run-start", "run": "81", "name": "fit Net"})
    assert time.monotonic() - began < 0.5
    with pytest.raises(SparkDMLError, match="the tracker MLflow failed and gets no more numbers"):
        observer.close()


@pytest.mark.spark
def test_a_fit_tells_the_server(server, spark):
    import sparkdml as dml
    from sparkdml.testing import models

    rows = [([0.1 * i, 1.0, 2.0, 3.0], i % 3) for i in range(96)]
    frame = spark.createDataFrame(rows, "features array<float>, label long")
    fitted = dml.TorchEstimator(
        model=models.TinyClassifier,
        loss=models.torch.nn.CrossEntropyLoss(),
        optimizer=models.torch.optim.SGD,
        metrics={"accuracy": models.accuracy},
        numWorkers=2,
        epochs=3,
        batchSize=8,
        verbose=0,
        tracker=MLflow(server, "fits"),
    ).fit(frame)
    run = only_run(server, "fits")
    assert run.info.status == "FINISHED"
    told = client(server).get_metric_history(run.info.run_id, "loss")
    assert [point.value for point in sorted(told, key=lambda p: p.step)] == fitted.history.loss
    assert run.data.params["workers"] == "2"
