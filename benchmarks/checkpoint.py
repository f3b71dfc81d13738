"""What checkpoints cost: `python benchmarks/checkpoint.py --help`.

1. A run with checkpoints against the same run without, in one process, in turns. The whole call is
   timed, including the checkpoints before the first step and at the end, which every run writes,
   however short it is. By default "auto" expects one failure a day, and so takes few more than
   these two in runs as short as here; two other settings show what more of them cost. A second run
   without any shows how far two equal runs lie apart; the first in turn changes.
2. The copy that the training thread waits for, and the write behind it, against `torch.save` of
   the same tensors to the same disk. Both of them sync their file; `torch.save` without a sync is
   given as well. The write also hashes (SHA-256), which `torch.save` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

import sparkdml as dml
from benchmarks.checkpoint_state import make_state, measure_state, ratio, state_to_markdown
from benchmarks.measurement import WHOLE_CALL, Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.report import describe_machine
from benchmarks.session import prepare_environment, start_session
from benchmarks.workloads import SEED, WORKERS, Training, ensure_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESULTS = Path(__file__).resolve().parent / "results"
AIM = 0.97
EPOCHS = "all epochs"  # without start-up, and without what comes before and after them
NONE, CONTROL = "no checkpoints", "no checkpoints, once more"
SETTINGS: dict[str, dict[str, Any]] = {
    'every="auto"': {},
    'every="auto", failure_seconds=300': {"failure_seconds": 300.0},
    'every="2 seconds"': {"every": "2 seconds"},
}


@dataclass(frozen=True)
class Size:
    """How much there is to do."""

    workload: Training
    hidden: int
    state_megabytes: int


FULL = Size(
    Training("CK", "an MLP with Adam", 48_000, 32, 2, "mlp", batch_size=256, epochs=2), 1408, 256
)
QUICK = Size(
    Training("CK", "an MLP with Adam", 8_000, 32, 2, "mlp", batch_size=256, epochs=2), 512, 16
)


def make_model(width: int, hidden: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


@dataclass(frozen=True)
class Taken:
    """The checkpoints of one run."""

    count: int
    num_bytes: int
    copy_seconds: float  # the median of them
    write_seconds: float


def fit(rows: DataFrame, size: Size, checkpoints: dml.Checkpoints | None) -> Measurement:
    work = size.workload
    estimator = dml.TorchEstimator(
        model=partial(make_model, work.width, size.hidden, work.classes),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.001),
        batchSize=work.batch_size,
        epochs=work.epochs,
        numWorkers=WORKERS,
        seed=SEED,
        strategy=dml.AllReduce(backend="torch"),
        checkpoint=checkpoints,
        verbose=0,
    )
    load = os.getloadavg()[0]
    started = time.monotonic()
    fitted = estimator.fit(rows)
    whole = time.monotonic() - started
    epochs = sum(row["seconds"] for row in fitted.history)
    last = fitted.history[-1]
    return Measurement({WHOLE_CALL: whole, EPOCHS: epochs}, int(last["rows"]), last["loss"], load)


def fit_with(rows: DataFrame, size: Size, place: Path, setting: dict[str, Any]) -> tuple[Any, ...]:
    checkpoints = dml.Checkpoints(f"file:{place}", **setting)
    try:
        measured = fit(rows, size, checkpoints)
        manifests = checkpoints.lineage().manifests
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return measured, Taken(
        len(manifests),
        max(manifest.num_bytes for manifest in manifests),
        statistics.median(manifest.copy_seconds for manifest in manifests),
        statistics.median(manifest.write_seconds for manifest in manifests),
    )


def measure_runs(
    rows: DataFrame, size: Size, folder: Path, rounds: int
) -> tuple[list[Round], dict[str, list[Taken]]]:
    fit(rows, size, None)  # untimed: starts the Python workers, compiles the JVM's code
    measured: list[Round] = []
    taken: dict[str, list[Taken]] = {name: [] for name in SETTINGS}
    names = [NONE, *SETTINGS, CONTROL]
    for number in range(rounds):
        entry: Round = {}
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in SETTINGS:
                entry[name], found = fit_with(rows, size, folder / "run", SETTINGS[name])
                taken[name].append(found)
            else:
                entry[name] = fit(rows, size, None)
        measured.append(entry)
        seconds = ", ".join(f"{entry[name].seconds[WHOLE_CALL]:.1f}" for name in names)
        print(f"round {number + 1} of {rounds}: {seconds} s", file=sys.stderr)
    return measured, taken


def runs_to_markdown(rounds: list[Round], taken: dict[str, list[Taken]]) -> list[str]:
    lines = [
        "| | whole call, s | as fast as without, whole call | epochs alone | checkpoints "
        "| copy, ms | write, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (NONE, CONTROL, *SETTINGS):
        spread = Spread.of(seconds_of(rounds, name, WHOLE_CALL))
        assert spread is not None
        cells = [name, f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})"]
        cells += [ratio(rounds, name, NONE, WHOLE_CALL), ratio(rounds, name, NONE, EPOCHS)]
        found = taken.get(name)
        if found is None:
            cells += ["0", "-", "-"]
        else:
            cells += [
                f"{statistics.median(each.count for each in found):.0f}",
                f"{1000 * statistics.median(each.copy_seconds for each in found):.1f}",
                f"{1000 * statistics.median(each.write_seconds for each in found):.0f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/checkpoint.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    prepare_environment()
    torch.set_num_threads(1)  # as in a worker
    size = QUICK if options.quick else FULL
    options.results.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.results))
    try:
        states, num_bytes = measure_state(
            make_state(size.state_megabytes), folder, 2 * options.rounds
        )
        spark = start_session()
        try:
            rows = spark.read.parquet(str(ensure_data(size.workload, options.results / "data")))
            runs, taken = measure_runs(rows, size, folder, options.rounds)
        finally:
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    checkpoint_bytes = max(each.num_bytes for found in taken.values() for each in found)
    auto = next(iter(SETTINGS))
    reached = times_as_fast(runs, auto, [NONE], WHOLE_CALL)
    assert reached is not None
    table = "\n".join(
        [
            f"A run of {size.workload.epochs} epochs of {size.workload.rows:,} rows on {WORKERS} "
            f"workers, a checkpoint of {checkpoint_bytes / 1e6:.0f} MB, {options.rounds} rounds:",
            "",
            *runs_to_markdown(runs, taken),
            "",
            f"Target for {auto}: {AIM} of the whole call; measured: {reached.median:.3f}.",
            "",
            f"A state of {num_bytes / 1e6:.0f} MB, {2 * options.rounds} rounds:",
            "",
            *state_to_markdown(states, num_bytes),
        ]
    )
    values = {
        "machine": describe_machine(),
        "runs": [{name: m.to_dict() for name, m in entry.items()} for entry in runs],
        "checkpoints": {name: [vars(each) for each in found] for name, found in taken.items()},
        "state": [{name: m.to_dict() for name, m in entry.items()} for entry in states],
        "state_bytes": num_bytes,
    }
    (options.results / "checkpoint.json").write_text(json.dumps(values, indent=2))
    (options.results / "checkpoint.md").write_text(table + "\n")
    print(table)
    if options.quick:
        print("\nA --quick run: it checks that the benchmark works, and its times mean nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
