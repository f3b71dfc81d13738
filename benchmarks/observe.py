"""The cost of observing a run: `python benchmarks/observe.py --help`.

The same fit with everything switched on (the Training tab with a live UI and the event log, a trace
of all ranks, a tracker, workers' prints at the driver, verbose=2) and with everything off, in one
process, in turns. The epochs are timed, without start-up. In a third fit the collector, which
delivers the events at the driver, stops for good soon after the start. Another one with everything
off shows how much two equal runs differ; the order rotates from round to round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

import sparkdml as dml
from benchmarks.checkpoint_state import ratio
from benchmarks.measurement import WHOLE_CALL, Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.session import prepare_environment
from benchmarks.workloads import SEED, WORKERS, Training, ensure_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RESULTS = Path(__file__).resolve().parent / "results"
AIM = 0.98
EPOCHS = "all epochs"
EVENTS_BEFORE_THE_STOP = 5
OFF, CONTROL = "everything off", "everything off, once more"
ON, STOPPED = "everything on", "everything on, the collector stops mid-run"
FULL = Training("OB", "an MLP", 400_000, 32, 2, "mlp", batch_size=256, epochs=6)
QUICK = Training("OB", "an MLP", 20_000, 32, 2, "mlp", batch_size=256, epochs=2)


class Speaks(dml.Callback):
    """Prints now and then, as users' code does."""

    def on_epoch_end(self, training: Any, row: dict[str, float]) -> None:
        print(f"epoch {row['epoch']:.0f}: {row['loss']:.4f}")


class Counts:
    """A tracker that only counts."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.calls += 1

    def close(self) -> None:
        """Nothing is open."""


class StopsTheCollector:
    """An observer that takes some events, and then blocks until the run is over."""

    def __init__(self) -> None:
        self.run_is_over = threading.Event()
        self.num_events = 0

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        self.num_events += 1
        if self.num_events > EVENTS_BEFORE_THE_STOP:
            self.run_is_over.wait()

    def close(self) -> None:
        """Nothing is open."""


class WatchedBy(dml.TorchEstimator):
    """Add an observer before all others."""

    first: StopsTheCollector | None = None

    def _observers(self, spark: SparkSession) -> list[Any]:
        others = super()._observers(spark)
        return others if self.first is None else [self.first, *others]


def make_model(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, classes))


def fit(spark: SparkSession, rows: DataFrame, work: Training, name: str) -> Measurement:
    watch = name in (ON, STOPPED)
    spark.conf.set("spark.sparkdml.ui.enabled", "true" if watch else "false")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        watching: dict[str, Any] = {
            "timeline": str(Path(folder, "trace.json")),
            "tracker": Counts(),
            "logs": "driver",
            "verbose": 2,
        }
        estimator = WatchedBy(
            model=partial(make_model, work.width, work.classes),
            loss=nn.CrossEntropyLoss(),
            optimizer=partial(torch.optim.SGD, lr=work.learning_rate),
            batchSize=work.batch_size,
            epochs=work.epochs,
            numWorkers=WORKERS,
            seed=SEED,
            strategy=dml.AllReduce(backend="torch"),
            callbacks=[Speaks()],
            **(watching if watch else {"verbose": 0}),
        )
        if name == STOPPED:
            stops = estimator.first = StopsTheCollector()
            release_after_run(spark, stops)
        load, started = os.getloadavg()[0], time.monotonic()
        with contextlib.redirect_stderr(io.StringIO()):
            fitted = estimator.fit(rows)
        whole = time.monotonic() - started
    last = fitted.history[-1]
    seconds = {WHOLE_CALL: whole, EPOCHS: sum(row["seconds"] for row in fitted.history)}
    return Measurement(seconds, int(last["rows"]), last["loss"], load)


def release_after_run(spark: SparkSession, stops: StopsTheCollector) -> None:
    """Release it once Spark has no job left: the end of the fit would wait for the collector."""
    status = spark.sparkContext.statusTracker()

    def wait() -> None:
        while stops.num_events <= EVENTS_BEFORE_THE_STOP or status.getActiveJobsIds():
            time.sleep(0.2)
        stops.run_is_over.set()

    threading.Thread(target=wait, daemon=True).start()


def measure(
    spark: SparkSession, rows: DataFrame, work: Training, rounds: int
) -> tuple[list[Round], bool]:
    """Return the rounds, and whether all runs ended with the same loss, as they should."""
    names = [OFF, ON, CONTROL, STOPPED]
    fit(spark, rows, work, ON)  # untimed: starts the Python workers, attaches the tab
    measured: list[Round] = []
    for number in range(rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        entry: Round = {name: fit(spark, rows, work, name) for name in order}
        measured.append(entry)
        text = ", ".join(f"{entry[name].seconds[EPOCHS]:.1f}" for name in names)
        print(f"round {number + 1} of {rounds}: {text} s", file=sys.stderr)
    losses = {entry[name].loss for entry in measured for name in names}
    return measured, len(losses) == 1


def start_session(folder: str) -> SparkSession:
    """With a live UI and an event log: both are part of what is measured."""
    session = (
        dml.session_builder("sparkdml benchmarks", f"local[{WORKERS}]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.port", "0")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", f"file:{folder}")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/observe.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    prepare_environment()
    work = QUICK if options.quick else FULL
    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        spark = start_session(folder)
        try:
            rows = spark.read.parquet(str(ensure_data(work, options.results / "data")))
            rounds, same = measure(spark, rows, work, options.rounds)
        finally:
            spark.stop()
    lines = ["| | epochs, s | as fast as everything off |", "|---|---|---|"]
    for name in (OFF, CONTROL, ON, STOPPED):
        spread = Spread.of(seconds_of(rounds, name, EPOCHS))
        assert spread is not None
        cell = f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
        lines.append(f"| {name} | {cell} | {ratio(rounds, name, OFF, EPOCHS)} |")
    reached = times_as_fast(rounds, ON, [OFF], EPOCHS)
    assert reached is not None
    lines += ["", f"Target: {AIM}; measured: {reached.median:.3f}. Same loss in all runs: {same}."]
    table = "\n".join(lines)
    (options.results / "observe.md").write_text(table + "\n")
    print(table)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
