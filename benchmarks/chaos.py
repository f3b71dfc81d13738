"""Random faults of every kind during one long run: `python benchmarks/chaos.py --help`.

Trains once without faults, then again while executors and Python workers are killed with -9, a
worker is stopped with SIGSTOP, code raises, the executors' local disk fills up and the store can't
be reached. Both must end with the same bits. The faults are real, in real processes
(chaos_world.py):

- Workers kill, stop or raise after a step of the schedule. Only the package restarts them.
- The disk is full to the last byte until the driver has reported it; then its space is freed, as an
  operator would do, and the run must continue by itself. It fills during the first epoch, when rows
  are written to it. Where no disk can be mounted (that needs root), this kind is left out.
- The store refuses connections until the driver has warned of it, or 30 s. Training must go on
  meanwhile, so nothing is resumed; "safe again" is when the next checkpoint is complete.

A fault is detected when the driver learns of it, and resumed when rank 0 has made its first step
after it, including the restart of an executor, Python and torch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import safetensors.torch
import torch
from torch import nn

import sparkdml as dml
from benchmarks.chaos_faults import (
    BY_THE_WORKER,
    FROM_OUTSIDE,
    FirstSteps,
    Outside,
    callbacks_for,
    make_schedule,
    num_stretches,
)
from benchmarks.chaos_report import Log, judge, to_markdown
from benchmarks.chaos_world import BUCKET, Disk, ObjectStore, start_cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdml.fitting.fit import Fitted

RESULTS = Path(__file__).resolve().parent / "results"
WORKERS, ROWS, WIDTH, BATCH = 2, 8_000, 16, 32
SECONDS_A_STEP = 0.01
STEPS_A_STRETCH = 200  # so that the run makes progress between two faults
STEPS_BETWEEN_CHECKPOINTS = 20
SEED = 7


def make_model() -> nn.Module:
    """Batch statistics and dropout, so that the bits depend on all of the past."""
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2)
    )


def make_rows(spark: SparkSession) -> DataFrame:
    cells = ", ".join(f"cast(randn({seed}) as float)" for seed in range(WIDTH))
    rows = spark.range(0, ROWS, 1, numPartitions=4).selectExpr(f"array({cells}) as features")
    return rows.selectExpr("features", "cast(features[0] + features[1] > 0 as bigint) as label")


def train(
    rows: DataFrame,
    epochs: int,
    callbacks: list[dml.Callback],
    checkpoints: dml.Checkpoints | None,
    log: Log,
) -> Fitted:
    estimator = dml.TorchEstimator(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.003),
        batchSize=BATCH,
        epochs=epochs,
        numWorkers=WORKERS,
        seed=SEED,
        strategy=dml.AllReduce(backend="torch"),
        callbacks=callbacks,
        replacementSeconds=60.0,
        verbose=0,
    )
    return estimator._prepare(rows).train(checkpoints, log.on_event)


def run_chaos(
    spark: SparkSession, folder: Path, log: Log, count: int, seed: int, results: Path
) -> int:
    rows = make_rows(spark)
    kinds = [*BY_THE_WORKER, *(k for k in FROM_OUTSIDE if k != "full disk" or log.disk.is_mounted)]
    epochs = 2 + -(-num_stretches(count, kinds) * STEPS_A_STRETCH // (ROWS // WORKERS // BATCH))
    print(f"without faults: {epochs} epochs", file=sys.stderr)
    expected = train(rows, epochs, [], None, log)
    steps = int(sum(row["steps"] for row in expected.result.history))
    schedule = make_schedule(count, kinds, steps, steps // epochs, WORKERS, seed)
    checkpoints = dml.Checkpoints(
        f"s3://{BUCKET}/run", STEPS_BETWEEN_CHECKPOINTS, storage_options=log.store.options
    )
    outside = Outside(schedule, folder, log.strike)
    outside.start()
    print(f"with faults: {count} faults in {steps} steps", file=sys.stderr)
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = log.on_warning
        callbacks = [FirstSteps(str(folder), SECONDS_A_STEP), *callbacks_for(schedule, str(folder))]
        fitted = train(rows, epochs, callbacks, checkpoints, log)
    seconds = time.monotonic() - started
    outside.end()
    outcomes = judge(schedule, folder, log, checkpoints.lineage())
    ours, theirs = (safetensors.torch.load(each.result.weights) for each in (fitted, expected))
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = (
        f"{to_markdown(outcomes)}\n{count} faults in {steps:,} steps and {seconds:.0f} s, seed "
        f"{seed}. The weights are {'the same, bit for bit' if same else 'NOT THE SAME'}.\n"
    )
    if not log.disk.is_mounted:
        found += "No full disk: mounting one was refused.\n"
    print(found)
    results.mkdir(parents=True, exist_ok=True)
    (results / "chaos.md").write_text(found)
    missed = [each.fault for each in outcomes if not each.is_right]
    for fault in missed:
        print(f"unexpected: {fault}", file=sys.stderr)
    return 0 if same and not missed else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/chaos.py", description=__doc__)
    parser.add_argument("--faults", type=int, default=12, help="faults; each kind in turn")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    options = parser.parse_args(argv)
    if options.faults < 1:
        parser.error(f"--faults must be at least 1 but got {options.faults}")
    folder = Path(tempfile.mkdtemp(prefix="sparkdml-chaos-"))
    disk = Disk(folder / "disk")
    try:
        store = ObjectStore()
        try:
            spark = start_cluster(folder, disk)
            try:
                log = Log(disk, store)
                return run_chaos(spark, folder, log, options.faults, options.seed, options.results)
            finally:
                spark.stop()
        finally:
            store.close()
    finally:
        disk.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
