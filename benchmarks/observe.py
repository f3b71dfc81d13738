"""What watching a run costs: `python benchmarks/observe.py --help`.

The same fit with everything switched on (the Training tab with a live UI and the event log, a trace
of all ranks, a tracker, workers' prints at the driver, verbose=2) and with everything off, in one
process, in turns. The epochs count, without start-up. A second fit with everything off shows how
far two equal runs lie apart; the first in turn changes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
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
OFF, ON, CONTROL = "everything off", "everything on", "everything off, once more"
FULL = Training("OB", "an MLP", 400_000, 32, 2, "mlp", batch_size=256, epochs=3)
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


def make_model(width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, classes))


def fit(spark: SparkSession, rows: DataFrame, work: Training, watch: bool) -> Measurement:
    spark.conf.set("spark.sparkdml.ui.enabled", "true" if watch else "false")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        watching: dict[str, Any] = {
            "timeline": str(Path(folder, "trace.json")),
            "tracker": Counts(),
            "logs": "driver",
            "verbose": 2,
        }
        estimator = dml.TorchEstimator(
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
        load, started = os.getloadavg()[0], time.monotonic()
        with contextlib.redirect_stderr(io.StringIO()):
            fitted = estimator.fit(rows)
        whole = time.monotonic() - started
    last = fitted.history[-1]
    seconds = {WHOLE_CALL: whole, EPOCHS: sum(row["seconds"] for row in fitted.history)}
    return Measurement(seconds, int(last["rows"]), last["loss"], load)


def measure(
    spark: SparkSession, rows: DataFrame, work: Training, rounds: int
) -> tuple[list[Round], bool]:
    """The rounds, and whether all runs ended with the same loss: watching changes nothing."""
    names = [OFF, ON, CONTROL]
    fit(spark, rows, work, watch=True)  # untimed: starts the Python workers, attaches the tab
    measured: list[Round] = []
    for number in range(rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        entry: Round = {name: fit(spark, rows, work, watch=name == ON) for name in order}
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
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
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
    for name in (OFF, CONTROL, ON):
        spread = Spread.of(seconds_of(rounds, name, EPOCHS))
        assert spread is not None
        cell = f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
        lines.append(f"| {name} | {cell} | {ratio(rounds, name, OFF, EPOCHS)} |")
    reached = times_as_fast(rounds, ON, [OFF], EPOCHS)
    assert reached is not None
    lines += ["", f"Wanted: {AIM}; measured: {reached.median:.3f}. Same loss in all runs: {same}."]
    table = "\n".join(lines)
    (options.results / "observe.md").write_text(table + "\n")
    print(table)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
