"""A run that is killed twice and ends with the same bits: `python examples/resume.py`.

The first driver is killed with -9 in the middle of an epoch. A second one finds its checkpoints and
resumes; then one of its workers is killed, too. At the end the weights are compared with those of a
run that was not interrupted. `--output` names a folder for the checkpoints and the drawn lineage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import nn

import sparkdml as dml
from sparkdml.testing.faults import FaultAt

STEPS_AN_EPOCH = 29  # 1,797 rows, 2 workers with 32 rows each a step
DRIVER_DIES_AFTER = 2 * STEPS_AN_EPOCH + 12
WORKER_DIES_AT = 5 * STEPS_AN_EPOCH + 23


class TakesItsTime(dml.Callback):
    """Slows training down: digits are learned too quickly to kill a process meanwhile."""

    def on_step_end(self, training: object) -> None:
        time.sleep(0.02)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def make_estimator(**params: Any) -> dml.TorchEstimator:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        batchSize=32,
        epochs=8,
        numWorkers=2,
        seed=7,
        **params,
    )


def start() -> tuple[SparkSession, DataFrame]:
    spark = dml.session_builder("resume", "local[2]").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # its message about a killed worker is a page of Java
    data = load_digits()
    rows = pd.DataFrame(
        {"features": list((data.data / 16).astype("float32")), "label": data.target}
    )
    return spark, spark.createDataFrame(rows)


def checkpoints_in(output: Path) -> dml.Checkpoints:
    return dml.Checkpoints(f"file:{output}/run", every="10 steps")


def train_with_checkpoints(rows: DataFrame, output: Path) -> dml.TorchModel:
    """Start or resume the run: the call is the same."""
    fault = FaultAt(rank=1, step=WORKER_DIES_AT, kind="kill", folder=str(output))
    estimator = make_estimator(checkpoint=checkpoints_in(output), callbacks=[TakesItsTime(), fault])
    return estimator.fit(rows)


def steps_saved(output: Path) -> list[int]:
    manifests = (output / "run" / "checkpoints").glob("*/manifest.json")
    return [json.loads(manifest.read_text())["step"] for manifest in manifests]


def kill_a_first_driver(output: Path) -> int:
    """Start this script in a separate process, and kill it; returns its newest saved step."""
    first = psutil.Popen([sys.executable, __file__, "--output", str(output), "--first-driver"])
    family = []
    try:
        while max(steps_saved(output), default=0) < DRIVER_DIES_AFTER:
            if first.poll() is not None:
                raise SystemExit(f"the first driver ended by itself, with code {first.returncode}")
            time.sleep(0.02)
        family = first.children(recursive=True)  # its JVM and the Python workers
    finally:
        first.kill()
        first.wait()
    _, left = psutil.wait_procs(family, timeout=30)
    if left:
        raise SystemExit(f"processes of the first driver are left: {[p.pid for p in left]}")
    return max(steps_saved(output))


def show(output: Path) -> bool:
    """Run the whole example; return whether the bits are the same."""
    print("-- a first driver starts the run, and is killed with -9", flush=True)
    saved = kill_a_first_driver(output)
    print(f"-- the driver is dead, step {saved} is saved. A second one resumes;", flush=True)
    print(f"-- at step {WORKER_DIES_AT} its rank 1 will be killed, too", flush=True)
    spark, rows = start()
    try:
        resumed = train_with_checkpoints(rows, output)
        print("-- the same training, undisturbed and without checkpoints", flush=True)
        undisturbed = make_estimator().fit(rows)
    finally:
        lineage = checkpoints_in(output).lineage()
        spark.stop()
    print(f"\n{lineage}\n")
    drawing = output / "lineage.svg"
    drawing.write_text(lineage.svg())
    print(f"drawn in {drawing}")
    one, other = resumed.module.state_dict(), undisturbed.module.state_dict()
    return all(torch.equal(one[name], other[name]) for name in other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a new folder; else a temporary one")
    parser.add_argument("--first-driver", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    output = options.output or Path(tempfile.mkdtemp(prefix="sparkdml-resume-"))
    output = output.absolute()
    if options.first_driver:
        train_with_checkpoints(start()[1], output)
        return
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        parser.error(f"--output must be a new or an empty folder, but {output} has files in it")
    if not show(output):
        raise SystemExit("killed twice, and the weights differ: they should not")
    print("killed twice, and the weights are the same, bit for bit")


if __name__ == "__main__":
    main()
