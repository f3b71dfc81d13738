"""Training on: warm starts, streams, Ctrl-C that keeps, and dry runs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sparkdml as dml
from sparkdml.feed.randomness import seed_everything
from sparkdml.training.weights import describe_state, load_state
from sparkdml.warm_start import starting_state

HERE = Path(__file__).parent


def net():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def estimator(**params):
    defaults = {
        "model": net,
        "loss": nn.MSELoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.01),
        "numWorkers": 1,
        "epochs": 1,
        "verbose": 0,
    }
    return dml.TorchEstimator(**{**defaults, **params})


@pytest.fixture(scope="module")
def rows(spark):
    return spark.range(64).selectExpr(
        "array(cast(id % 7 as float), cast(id % 3 as float)) as features",
        "cast(id % 7 as double) as label",
    )


# -- warm starts ----------------------------------------------------------------------------------


def test_a_state_fits_or_says_what_differs():
    module = net()
    state = net().state_dict()
    assert starting_state(None, module) is None
    found = starting_state(state, module)
    load_state(module, found)
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), state.values(), strict=True)
    )

    missing = dict(state)
    del missing["0.bias"]
    with pytest.raises(dml.ParameterError, match=r"warmStart.*it lacks 0\.bias"):
        starting_state(missing, module)
    with pytest.raises(dml.ParameterError, match=r"it has in addition 9\.weight"):
        starting_state({**state, "9.weight": torch.zeros(1)}, module)
    with pytest.raises(
        dml.ParameterError,
        match=r"shapes differ in 2\.weight \(\[1, 5\], and \[1, 4\] in the model",
    ):
        starting_state({**state, "2.weight": torch.zeros(1, 5)}, module)
    with pytest.raises(dml.ParameterError, match=r"types differ in 0\.bias \(torch\.int64"):
        starting_state({**state, "0.bias": torch.zeros(4, dtype=torch.int64)}, module)


def test_names_of_a_wrapper_are_recognised():
    wrapped = {f"module.{name}": value for name, value in net().state_dict().items()}
    with pytest.raises(dml.ParameterError, match=r"removeprefix\('module\.'\)"):
        starting_state(wrapped, net())


def test_many_names_are_cut_short():
    with pytest.raises(dml.ParameterError, match="and 6 more"):
        starting_state({"other": torch.zeros(1)}, nn.Sequential(*[nn.Linear(1, 1)] * 6))


def test_a_description_tells_weights_apart():
    state = net().state_dict()
    other = {**state, "0.bias": state["0.bias"] + 1e-6}
    assert describe_state(state) == describe_state({k: v.clone() for k, v in state.items()})
    assert describe_state(state) != describe_state(other)


def test_fits_start_from_a_model_and_from_its_state(spark, rows):
    first = estimator(epochs=2).fit(rows)
    still = estimator(optimizer=partial(torch.optim.SGD, lr=0.0), seed=99)
    for start in (first, first.module.state_dict()):
        fitted = still.copy({still.warmStart: start}).fit(rows)
        for name, parameter in fitted.module.named_parameters():
            assert torch.equal(parameter, dict(first.module.named_parameters())[name])
        batches = fitted.module.state_dict()["1.num_batches_tracked"]
        assert batches > first.module.state_dict()["1.num_batches_tracked"], "buffers go on too"
    on = estimator(warmStart=first).fit(rows)
    assert on.history[0]["loss"] < first.history[0]["loss"]


def test_another_model_is_refused_before_any_job(spark, rows):
    fitted = estimator().fit(rows)
    tracker = spark.sparkContext.statusTracker()
    before = len(tracker.getJobIdsForGroup(None))
    with pytest.raises(dml.ParameterError, match="the fitted Sequential"):
        estimator(model=partial(nn.Linear, 2, 1), warmStart=fitted).fit(rows)
    assert len(tracker.getJobIdsForGroup(None)) == before


# -- dry runs -------------------------------------------------------------------------------------


def test_a_wrong_shape_is_found_at_the_driver(spark, rows):
    wrong = estimator(model=partial(nn.Linear, 3, 1), dryRun=True)
    with pytest.raises(dml.DryRunError) as caught:
        wrong.fit(rows)
    message = str(caught.value)
    assert "features float32[8, 2]" in message
    assert "label float32[8]" in message
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert not isinstance(caught.value, dml.WorkerError)


def test_our_own_errors_pass_as_they_are(spark, rows):
    nulls = rows.selectExpr("features", "cast(null as double) as label")
    with pytest.raises(dml.DataError, match="'label' is null"):
        estimator(dryRun=True).fit(nulls)
    with pytest.raises(dml.DataError, match="no rows"):
        estimator(dryRun=True).fit(rows.filter("label > 100"))


def test_what_cannot_be_shipped_is_found(spark, rows):
    lock = __import__("threading").Lock()

    def loss(outputs, targets):
        with lock:
            return ((outputs - targets) ** 2).mean()

    with pytest.raises(dml.DryRunError, match="shipping the model, the loss and the optimizer"):
        estimator(dryRun=True, loss=loss).fit(rows)


def test_a_dry_run_changes_nothing(spark, rows):
    module = net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seed_everything(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    seed_everything(3)
    fitted = estimator(model=module, dryRun=True, validation=0.2).fit(rows)
    after = torch.rand(1).item(), np.random.rand(), random.random()
    assert after == expected, "the caller's random states are as they were"
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    plain = estimator(model=module, validation=0.2).fit(rows)
    for name, value in plain.module.state_dict().items():
        assert torch.equal(value, fitted.module.state_dict()[name])


# -- streams --------------------------------------------------------------------------------------


def write_batch(folder, number, slope=2.0):
    lines = [json.dumps({"x": i / 10, "label": slope * i / 10}) for i in range(number, number + 20)]
    temporary = folder / f".{number}"
    temporary.write_text("\n".join(lines))
    temporary.rename(folder / f"{number}.json")


def stream_of(spark, folder):
    return (
        spark.readStream.schema("x double, label double")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder))
        .selectExpr("array(cast(x as float)) as features", "label")
    )


def online(**params):
    return estimator(
        model=partial(nn.Linear, 1, 1), optimizer=partial(torch.optim.SGD, lr=0.05), **params
    )


def run_stream(spark, source, state, trainer):
    query = (
        stream_of(spark, source)
        .writeStream.option("checkpointLocation", str(state))
        .foreachBatch(trainer)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(100)
    assert query.exception() is None


def test_a_stream_trains_each_batch_once_over_restarts(spark, tmp_path):
    source, models, state = (tmp_path / name for name in ("source", "models", "state"))
    source.mkdir()
    write_batch(source, 0)
    write_batch(source, 1)
    trainer = dml.OnlineTrainer(online(), str(models), spark=spark)
    run_stream(spark, source, state, trainer)
    assert trainer.last_batch == 1
    assert trainer.num_rows == 40
    learnt = trainer.model.module.weight.item()

    # The last batch comes again, as after a driver that died before Spark noted its end.
    for name in ("1", ".1.crc"):
        (state / "commits" / name).unlink()
    again = dml.OnlineTrainer(online(), str(models), spark=spark)
    assert again.last_batch == 1
    assert again.model.module.weight.item() == learnt
    write_batch(source, 2)
    run_stream(spark, source, state, again)
    assert again.last_batch == 2
    assert again.num_rows == 20, "the batch that came again was passed over"
    assert again.model.module.weight.item() != learnt
    assert abs(again.model.module.weight.item() - 2) < abs(learnt - 2)
    kept = sorted(path.name for path in models.iterdir() if any(path.rglob("*.safetensors")))
    assert kept == ["batch-0000000001", "batch-0000000002"]


def test_batches_without_rows_leave_the_model(spark, rows):
    trainer = dml.OnlineTrainer(estimator())
    trainer(rows.filter("label > 100"), 0)
    assert trainer.model is None
    assert trainer.last_batch == 0


def test_online_trainers_refuse(spark, rows):
    with pytest.raises(dml.ParameterError, match="every batch would be a different run"):
        dml.OnlineTrainer(estimator(checkpoint="file:/nowhere"))
    with pytest.raises(dml.ParameterError, match="a TorchEstimator"):
        dml.OnlineTrainer(net())
    import pickle

    with pytest.raises(dml.SetupError, match="Use a classic session"):
        pickle.dumps(dml.OnlineTrainer(estimator()))


# -- Ctrl-C ---------------------------------------------------------------------------------------


def interrupt(tmp_path, signals):
    """A fit that would never end, in a process of its own, gets Ctrl-C `signals` times."""
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "runtime" / "kept_job.py"), str(tmp_path)],
        env={
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "training").exists():
            assert driver.poll() is None, driver.communicate()[0][-3000:]
            assert time.monotonic() < deadline, "training has not begun"
            time.sleep(0.1)
        for _ in range(signals):
            driver.send_signal(signal.SIGINT)
            time.sleep(0.3)
        said, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert (tmp_path / "result.json").exists(), said[-3000:]
    return json.loads((tmp_path / "result.json").read_text()), said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_keeps_the_model_so_far(tmp_path):
    result, said = interrupt(tmp_path, 1)
    assert result["outcome"] == "kept"
    assert result["stopped"] == "interrupted"
    assert result["epochs"] < 100_000
    assert result["moved"]
    assert result["after"] == [0, 1], "the session is still good"
    assert "Press Ctrl-C again to stop at once" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_ctrl_c_raises(tmp_path):
    (tmp_path / "slow").touch()  # steps of many seconds: the first wish can't be granted soon
    result, _ = interrupt(tmp_path, 2)
    assert result == {"outcome": "raised"}
