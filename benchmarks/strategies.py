"""Every strategy on the same images, by `dml.compare`: `python benchmarks/strategies.py --help`.

MNIST, where SPARKDML_DATA names the folder that has `mnist/`; else scikit-learn's digits. The table
has each strategy's cost, and its accuracy on the test images, with the difference in percentage
points from synchronous SGD's. benchmarks/stragglers.py measures them with a slow worker.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
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

    from sparkdml.comparison.result import Comparison

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
SEED = 7
SYNCHRONOUS = "AllReduce"
WITHIN = 0.005  # of synchronous SGD's accuracy must be those that are named here
CLOSE = ("OneBit", "BlockMomentum", "LocalSGD(8)", "Gossip")


def line_up() -> dict[str, dml.Strategy]:
    return {
        SYNCHRONOUS: dml.AllReduce(),
        "ring": dml.AllReduce(topology="ring"),
        "tree": dml.AllReduce(topology="tree"),
        "double tree": dml.AllReduce(topology="double-tree"),
        "halving-doubling": dml.AllReduce(topology="halving-doubling"),
        "hierarchical": dml.AllReduce(topology="hierarchical"),
        "shared memory": dml.AllReduce(topology="shared-memory"),
        "FP16": dml.AllReduce(compression=dml.FP16()),
        "OneBit": dml.AllReduce(compression=dml.OneBit()),
        "TopK": dml.AllReduce(compression=dml.TopK(0.05)),
        "PowerSGD": dml.AllReduce(compression=dml.PowerSGD(2)),
        "LocalSGD(8)": dml.LocalSGD(steps=8),
        "BlockMomentum": dml.BlockMomentum(block=8),
        "SlowMo": dml.SlowMo(),
        "EASGD": dml.EASGD(),
        "Gossip": dml.Gossip(),
        "ADPSGD": dml.ADPSGD(),
        "AdaptiveBalance": dml.AdaptiveBalance(),
        "BackupWorkers(1)": dml.BackupWorkers(1),
        "LayeredSGD(2)": dml.LayeredSGD(group_size=2),
        "Averaging": dml.Averaging(),
        "Hogwild": dml.Hogwild(),
        "ParameterServer": dml.ParameterServer(),
        "SSP(3)": dml.ParameterServer(consistency=dml.SSP(3)),
        "TAP": dml.ParameterServer(consistency=dml.TAP()),
        "Downpour": dml.Downpour(),
        "Hybrid(2)": dml.Hybrid(group_size=2),
        "LBFGS": dml.LBFGS(),
        "NewtonCG": dml.NewtonCG(),
    }


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


def read_images(spark: SparkSession, data: Path | None, rows: int) -> tuple[DataFrame, DataFrame]:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    from mnist import blow_up_digits, read_mnist  # the example's readers

    if data is None:
        train, test = blow_up_digits(spark)
    else:
        train, test = (read_mnist(spark, data / "mnist", name) for name in ("train", "t10k"))
    return train.limit(rows).repartition(4).cache(), test.repartition(4).cache()


def make_estimator(epochs: int) -> dml.TorchEstimator:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        batchSize=32,
        epochs=epochs,
        numWorkers=4,
        seed=SEED,
        metrics={"accuracy": accuracy},
        verbose=0,
    )


def away(found: Comparison) -> dict[str, float]:
    """Points of accuracy above synchronous SGD's; below it where negative."""
    usual = found[SYNCHRONOUS].metrics["accuracy"]
    return {one.name: one.metrics["accuracy"] - usual for one in found if not one.error}


def to_markdown(found: Comparison) -> str:
    apart = away(found)
    lines = [
        "| strategy | s | steps | compute, s | communication, s | MB sent | messages | loss "
        "| accuracy | points | distance | unbeaten |",
        "|---" * 12 + "|",
    ]
    for one in found:
        if one.error:
            lines.append(f"| {one.name} | failed: {one.error} |" + " |" * 10)
            continue
        cells = [
            one.name,
            f"{one.seconds:.1f}",
            f"{one.steps:,}",
            f"{one.compute_seconds:.1f}",
            f"{one.communication_seconds:.1f}",
            f"{one.sent_bytes / 1e6:,.1f}",
            f"{one.messages:,.0f}",
            f"{one.loss:.4f}",
            f"{one.metrics['accuracy']:.2%}",
            f"{100 * apart[one.name]:+.2f}",
            f"{one.distance:.2f}",
            "yes" if one.name in found.frontier else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def judge(found: Comparison) -> list[str]:
    """The aims that were missed."""
    apart = away(found)
    missed = [
        f"{name}: {100 * apart[name]:+.2f} points beside synchronous SGD"
        for name in CLOSE
        if name in apart and apart[name] < -WITHIN
    ]
    return missed + [f"{one.name} failed: {one.error}" for one in found if one.error]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/strategies.py", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="some of the strategies, by name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the tables")
    options = parser.parse_args(argv)
    strategies = line_up()
    unknown = set(options.only or ()) - set(strategies)
    if unknown:
        parser.error(f"--only must be some of {', '.join(strategies)} but got {sorted(unknown)}")
    if options.only:
        strategies = {n: s for n, s in strategies.items() if n in {SYNCHRONOUS, *options.only}}
    prepare_environment()
    options.results.mkdir(parents=True, exist_ok=True)
    spark = (
        # Some strategies have tasks beside the four workers.
        dml.session_builder("sparkdml benchmarks", "local[6]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "3g")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        data = None if options.data is None else Path(options.data)
        train, test = read_images(spark, data, options.rows)
        found = dml.compare(make_estimator(options.epochs), train, strategies, on=test)
    finally:
        spark.stop()
    (options.results / "strategies.md").write_text(to_markdown(found))
    (options.results / "strategies.json").write_text(json.dumps(found.rows, indent=2))
    print(to_markdown(found))
    print("\n".join(found.describe()))
    missed = judge(found)
    print("\n".join(["missed:", *missed]) if missed else "all aims reached")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
