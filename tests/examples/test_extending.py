"""The examples of what extends sparkdml: each keeps its contract, and trains on Spark's workers."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import sparkdml as dml
from sparkdml.extending import ReceivesOutcome, Tracker, TrackerSettings
from sparkdml.observe.observers import watched
from sparkdml.observe.trackers import TrackerObserver
from sparkdml.testing.compression_contract import CompressionCase, CompressionContract
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.faults import FailsAt, Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.strategy_contract import Case, StrategyContract
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from loading import load_example

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

callback = load_example("extending/callback.py")
compression = load_example("extending/compression.py")
strategy = load_example("extending/strategy.py")
tracker = load_example("extending/tracker.py")


def test_the_names_to_extend_with_import_no_pyspark() -> None:
    """Workers import them, too."""
    code = "import sys, sparkdml.extending; sys.exit('pyspark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- a callback ----------------------------------------------------------------------------------


def train_with_noise_scale(
    checkpoints: MemoryCheckpoints | None = None, fails_at: int = 0
) -> list[list[float]]:
    """The column that it adds, on each rank."""
    trainings = train_on_threads(
        dml.AllReduce,
        digits_plan(lr=0.1),
        Schedule(3, 8),
        cut(digits(160), [80, 80]),
        callbacks=lambda: [callback.NoiseScale(), FailsAt(1, fails_at)],
        checkpoints=checkpoints,
    )
    return [[row["noise_scale"] for row in training.history] for training in trainings]


def test_noise_scale_is_the_same_on_every_rank() -> None:
    one, other = train_with_noise_scale()
    assert one == other
    assert all(noise > 0 for noise in one)


def test_noise_scale_resumes_exactly() -> None:
    expected, kept = train_with_noise_scale(), MemoryCheckpoints(every=2)
    with pytest.raises(Injected):
        train_with_noise_scale(kept, fails_at=15)
    assert train_with_noise_scale(kept) == expected


def test_noise_scale_is_that_of_known_gradients() -> None:
    """Each row's gradient has the mean 1 and the variance 9 in each of 1,000 numbers."""
    ours, rows, generator = callback.NoiseScale(keep=0.99), 10, torch.Generator().manual_seed(0)
    training = SimpleNamespace(
        task=SimpleNamespace(params=SimpleNamespace(), totals=lambda: SimpleNamespace(rows=rows))
    )
    for _ in range(300):
        noise = 3 * torch.randn(1000, generator=generator) / rows**0.5
        training.task.params.grads = 1 + noise
        ours.on_gradient(training)
    row: dict[str, float] = {}
    ours.on_epoch_end(training, row)
    assert row["noise_scale"] == pytest.approx(9, rel=0.1)


@pytest.mark.spark
def test_a_callback_of_ones_own_on_spark(spark: SparkSession) -> None:
    history = callback.train(callback.read_digits(spark).limit(320), epochs=2).history
    assert len(history) == 2
    assert all(noise > 0 for noise in history.noise_scale)


# -- a compressor --------------------------------------------------------------------------------


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's modules are: plain pickle finds their classes by name."""
    for module in (compression, strategy):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("importable")
class TestRandomBlock(CompressionContract):
    cases = {
        "RandomBlock": CompressionCase(
            compression.RandomBlock,
            bad=[
                (partial(compression.RandomBlock, fraction=0.0), "fraction"),
                (partial(compression.RandomBlock, fraction=1.5), "fraction"),
            ],
        )
    }


@pytest.mark.usefixtures("importable")
class TestAllReduceWithRandomBlock(StrategyContract):
    cases = {
        "RandomBlock": Case(
            lambda: dml.AllReduce(compression=compression.RandomBlock(0.25), bucket_bytes=600),
            plain=lambda: dml.AllReduce(compression=compression.RandomBlock(1.0)),
            plain_workers=3,
            lr=0.2,  # what is sent late weighs on the next steps, as momentum does
            epochs=10,
        )
    }


@pytest.mark.spark
def test_a_compressor_of_ones_own_on_spark(spark: SparkSession) -> None:
    rows = compression.read_digits(spark).limit(600)
    fitted = compression.train(rows, compression.RandomBlock(0.25), epochs=6)
    assert fitted.history.accuracy[-1] > 0.8


# -- a tracker -----------------------------------------------------------------------------------


def run_tracked(path: Path, loss: float, fails: bool = False) -> None:
    start = {"name": "fit Net", "plan": {"optimizer": f"SGD(lr={loss})"}}
    with watched(start, [TrackerObserver(tracker.SQLite(str(path)))]) as tell:
        tell(0, {"kind": "epoch", "row": {"epoch": 1.0, "loss": loss}})
        if fails:
            raise Injected("lost")


def test_the_tracker_has_the_public_interfaces(tmp_path: Path) -> None:
    settings = tracker.SQLite(str(tmp_path / "runs.sqlite"))
    assert isinstance(settings, TrackerSettings)
    run = settings.begin("7f", "fit Net", {})
    assert isinstance(run, Tracker)
    assert isinstance(run, ReceivesOutcome)
    run.close()


def test_runs_and_how_they_ended_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite"
    run_tracked(path, 0.5)
    with pytest.raises(Injected):
        run_tracked(path, 0.25, fails=True)
    assert tracker.best_losses(path) == [("SGD(lr=0.25)", 0.25), ("SGD(lr=0.5)", 0.5)]
    with closing(sqlite3.connect(path)) as database:
        ends = set(database.execute("SELECT outcome, cause FROM runs"))
    assert ends == {("finished", None), ("failed", "lost")}


def test_a_file_that_can_not_be_written_costs_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="unable to open database file"):
        run_tracked(tmp_path / "no folder" / "runs.sqlite", 0.5)


@pytest.mark.spark
def test_a_tracker_of_ones_own_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "runs.sqlite")
    tracker.train(tracker.read_digits(spark).limit(320), path, [0.01, 0.5], epochs=2)
    (best, _), (other, _) = tracker.best_losses(path)
    assert "lr=0.5" in best
    assert "lr=0.01" in other


# -- a strategy ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("importable")
class TestPostLocalSGD(StrategyContract):
    cases = {
        "PostLocalSGD": Case(
            lambda: strategy.PostLocalSGD(epochs=1, steps=4),
            plain=lambda: strategy.PostLocalSGD(epochs=1, steps=1),
            plain_workers=3,
            bad=[
                (partial(strategy.PostLocalSGD, epochs=-1), "epochs"),
                (partial(strategy.PostLocalSGD, steps=0), "steps"),
            ],
        )
    }


def test_a_round_of_local_steps_is_one_step_of_the_history() -> None:
    trainings = train_on_threads(
        lambda: strategy.PostLocalSGD(epochs=1, steps=4),
        digits_plan(lr=0.1, momentum=0.9),
        Schedule(2, 8),
        cut(digits(128), [64, 64]),
    )
    assert [row["steps"] for row in trainings[0].history] == [8, 2]


@pytest.mark.spark
def test_a_strategy_of_ones_own_resumes_bit_for_bit_on_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = strategy.read_digits(spark).limit(320).cache()
    estimator = strategy.make_estimator(strategy.PostLocalSGD(epochs=1, steps=3), epochs=3)

    def fit(place: str, fault: dml.Callback) -> dml.TorchModel:
        # A fault's repr does not tell its settings: the run stays the same one.
        checkpoints = dml.Checkpoints(f"file:{tmp_path}/{place}", every=2)
        return estimator.copy().setCheckpoint(checkpoints).setCallbacks([fault]).fit(rows)

    never = FailsAt(1, 0)
    expected = fit("uninterrupted", never)
    with pytest.raises(dml.WorkerError, match="rank 1 at step 13"):
        fit("interrupted", FailsAt(1, 13))  # after local steps, in the second epoch
    resumed = fit("interrupted", never)
    assert [row["epoch"] for row in resumed.history] == [1, 2, 3]
    for name, value in expected.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], value)


@pytest.mark.spark
def test_a_run_with_another_strategys_settings_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The repr is part of the fingerprint."""
    rows = strategy.read_digits(spark).limit(64).cache()
    checkpoints = dml.Checkpoints(f"file:{tmp_path}/run")

    def fit(steps: int) -> None:
        post_local = strategy.PostLocalSGD(epochs=1, steps=steps)
        strategy.make_estimator(post_local, epochs=1).setCheckpoint(checkpoints).fit(rows)

    fit(steps=2)
    with pytest.raises(
        dml.CheckpointError, match=r"strategy was PostLocalSGD\(epochs=1, steps=2\)"
    ):
        fit(steps=4)
