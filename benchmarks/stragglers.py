"""One worker of four is always four times slower: `python benchmarks/stragglers.py --help`.

The time of a row is a sleep, so that it does not depend on the machine's few cores. Synchronous SGD
runs at the pace of the slow worker; the strategies for such a case should need at most two thirds
of its time: adaptive balance, AD-PSGD with moving rows, backup workers. The table also has the rows
of an epoch: those that were trained on, by the slow worker, and skipped. L-BFGS with backups is
compared with L-BFGS without, by the seconds of one pass over the rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import sparkdml as dml
from benchmarks.session import prepare_environment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdml.strategies.base import Strategy
    from sparkdml.training.run import TrainingRun

RESULTS = Path(__file__).resolve().parent / "results"
WORKERS, WIDTH, BATCH, SLOW_RANK, TIMES_SLOWER = 4, 16, 32, 3, 4
AIM = 1.5  # times as fast as the strategy that waits for the slow worker

STRATEGIES: dict[str, Strategy] = {
    "AllReduce": dml.AllReduce(),
    "AdaptiveBalance": dml.AdaptiveBalance(),
    "ADPSGD": dml.ADPSGD(),
    "BackupWorkers": dml.BackupWorkers(backup=1),
    "LBFGS": dml.LBFGS(tolerance=0.0),
    "LBFGS(backups=True)": dml.LBFGS(tolerance=0.0, backups=True),
}
PLAIN = {"LBFGS(backups=True)": "LBFGS"}  # what a strategy is compared with, if not AllReduce


class Sleeps(nn.Module):
    """Sleeps for each row, and longer on the slow rank."""

    def __init__(self, seconds_a_row: float) -> None:
        super().__init__()
        self.seconds_a_row = seconds_a_row
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            is_slow = os.environ.get("RANK") == str(SLOW_RANK)
            time.sleep(len(x) * self.seconds_a_row * (TIMES_SLOWER if is_slow else 1))
        outputs: Tensor = self.layers(x)
        return outputs


class RowsOfTheSlow(dml.Callback):
    """Adds a column to the history: the number of rows that the slow rank has trained on."""

    def on_epoch_end(self, training: TrainingRun, row: dict[str, float]) -> None:
        assert training.epoch is not None
        own = torch.tensor([training.epoch.own_rows])
        row["slow_rows"] = training.ctx.comm.allgather(own)[SLOW_RANK].item()
        row["seconds_a_pass"] = row["seconds"] / row.get("passes", 1.0)


@dataclass(frozen=True)
class Outcome:
    """One strategy's medians over the epochs after the first, in which rows are read."""

    name: str
    seconds_a_pass: float
    loss: float
    rows: float
    slow_rows: float
    skipped_rows: float

    def line(self, plain: Outcome) -> str:
        cells = (
            self.name,
            f"{self.seconds_a_pass:.2f}",
            f"{plain.seconds_a_pass / self.seconds_a_pass:.2f}",
            f"{self.rows:,.0f}",
            f"{self.slow_rows:,.0f}",
            f"{self.skipped_rows:,.0f}",
            f"{self.loss:.4f}",
        )
        return f"| {' | '.join(cells)} |"


def make_rows(spark: SparkSession, count: int) -> DataFrame:
    cells = ", ".join(f"cast(randn({seed}) as float)" for seed in range(WIDTH))
    rows = spark.range(0, count, 1, numPartitions=4).selectExpr(f"array({cells}) as features")
    return rows.selectExpr("features", "cast(features[0] + features[1] > 0 as bigint) as label")


def train(rows: DataFrame, name: str, epochs: int, seconds_a_row: float) -> Outcome:
    estimator = dml.TorchEstimator(
        model=partial(Sleeps, seconds_a_row),
        loss=nn.CrossEntropyLoss(),
        batchSize=BATCH,
        epochs=epochs,
        numWorkers=WORKERS,
        seed=7,
        strategy=STRATEGIES[name],
        callbacks=[RowsOfTheSlow()],
        verbose=0,
    )
    if not STRATEGIES[name].has_own_optimizer:
        estimator.setOptimizer(partial(torch.optim.SGD, lr=0.1))
    fitted = estimator.fit(rows)
    later = list(fitted.history)[1:]
    middle = {
        column: statistics.median(row.get(column, 0.0) for row in later)
        for column in ("seconds_a_pass", "rows", "slow_rows", "skipped_rows")
    }
    return Outcome(name, loss=later[-1]["loss"], **middle)


def start_session() -> SparkSession:
    session = (
        dml.session_builder()
        .master(f"local[{WORKERS}]")
        .appName("sparkdml stragglers")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def to_markdown(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| strategy | s per pass | times as fast | rows | by the slow worker | skipped | loss |",
        "|---|---|---|---|---|---|---|",
        *(outcome.line(plain_of(outcome, outcomes)) for outcome in outcomes),
    ]
    return "\n".join(lines) + "\n"


def plain_of(one: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    name = PLAIN.get(one.name, one.name if one.name in PLAIN.values() else "AllReduce")
    return next(other for other in outcomes if other.name == name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/stragglers.py", description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--milliseconds-a-row", type=float, default=0.5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    options = parser.parse_args(argv)
    if options.epochs < 2:
        parser.error(f"--epochs must be at least 2 but got {options.epochs}")
    prepare_environment()
    spark = start_session()
    try:
        rows = make_rows(spark, options.rows).cache()
        seconds_a_row = options.milliseconds_a_row / 1000
        train(rows, "AllReduce", 2, 0.0)  # Python and torch are started once
        outcomes = [train(rows, name, options.epochs, seconds_a_row) for name in STRATEGIES]
    finally:
        spark.stop()
    table = to_markdown(outcomes)
    print(table)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "stragglers.md").write_text(table)
    missed = [
        one.name
        for one in outcomes
        if (plain := plain_of(one, outcomes)) is not one
        and plain.seconds_a_pass / one.seconds_a_pass < AIM
    ]
    for name in missed:
        print(f"less than {AIM} times as fast: {name}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
