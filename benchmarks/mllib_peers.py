"""The same MLP beside Spark's own learners: `python benchmarks/mllib_peers.py --help`.

Each contender is the last stage of a Pipeline whose first assembles a vector from columns. All of
them train on the same cached rows, in turns within one session; fit and transform are timed, and
accuracy is measured on held-out rows. The labels come from products of random projections, so a
plane separates the classes only partly. MLlib's MLP has logistic units; ours has the same layers
with the same units, and is also measured with ReLU, which MLlib doesn't offer.

The table has each contender's budget (iterations, epochs, trees): they stop by their own rules, so
neither time alone nor accuracy alone says much.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd
import torch
from torch import nn

import sparkdml as dml
from benchmarks.measurement import Measurement
from benchmarks.ratios import Round, Spread, seconds_of
from benchmarks.session import prepare_environment, start_session
from benchmarks.workloads import SEED, WORKERS

if TYPE_CHECKING:
    from pyspark.ml import Estimator
    from pyspark.sql import DataFrame, SparkSession

RESULTS = Path(__file__).resolve().parent / "results"
FIT, TRANSFORM = "fit", "transform"
WIDTH, LAYERS = 32, (32, 128, 64, 2)
COLUMNS = [f"x{number}" for number in range(WIDTH)]


@dataclass(frozen=True)
class Size:
    """The sizes of a run; the quick one only checks that the benchmark works."""

    rows: int
    epochs: int
    perceptron_iterations: int
    regression_iterations: int
    trees: int


FULL = Size(200_000, 5, 50, 50, 50)
QUICK = Size(4_000, 2, 5, 5, 3)


@dataclass(frozen=True)
class Learner:
    """A contender: its name, its budget, and how its last stage is made."""

    name: str
    given: str
    make: Callable[[], Estimator[Any]]
    needs: str | None = None  # a package


def make_network(activation: type[nn.Module]) -> nn.Module:
    """MLlib's layers: every one but the last is followed by an activation."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(LAYERS):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def make_sparkdml(activation: type[nn.Module], epochs: int) -> Estimator[Any]:
    return dml.TorchEstimator(
        model=partial(make_network, activation),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.003),
        batchSize=256,
        epochs=epochs,
        numWorkers=WORKERS,
        seed=SEED,
        verbose=0,
    )


def make_perceptron(iterations: int) -> Estimator[Any]:
    from pyspark.ml.classification import MultilayerPerceptronClassifier

    return MultilayerPerceptronClassifier(layers=list(LAYERS), maxIter=iterations, seed=SEED)


def make_regression(iterations: int) -> Estimator[Any]:
    from pyspark.ml.classification import LogisticRegression

    return LogisticRegression(maxIter=iterations)


def make_xgboost(trees: int) -> Estimator[Any]:
    from xgboost.spark import SparkXGBClassifier

    classifier: Estimator[Any] = SparkXGBClassifier(
        n_estimators=trees, num_workers=WORKERS, random_state=SEED, verbose=False
    )
    return classifier


def line_up(size: Size) -> list[Learner]:
    epochs = f"{size.epochs} epochs, Adam"
    return [
        Learner("sparkdml, ReLU", epochs, partial(make_sparkdml, nn.ReLU, size.epochs)),
        Learner("sparkdml, logistic", epochs, partial(make_sparkdml, nn.Sigmoid, size.epochs)),
        Learner(
            "MultilayerPerceptronClassifier",
            f"{size.perceptron_iterations} iterations, L-BFGS",
            partial(make_perceptron, size.perceptron_iterations),
        ),
        Learner(
            "LogisticRegression",
            f"{size.regression_iterations} iterations",
            partial(make_regression, size.regression_iterations),
        ),
        Learner(
            "xgboost.spark", f"{size.trees} trees", partial(make_xgboost, size.trees), "xgboost"
        ),
    ]


def make_rows(spark: SparkSession, num_rows: int) -> tuple[DataFrame, DataFrame]:
    """Make training rows, and a quarter as many test rows, labelled by a random quadric."""
    dice = np.random.default_rng(SEED)
    features = dice.standard_normal((num_rows * 5 // 4, WIDTH)).astype(np.float32)
    one, other = features @ (dice.standard_normal((2, WIDTH, 4)) / np.sqrt(WIDTH))
    plane = features @ (dice.standard_normal(WIDTH) / np.sqrt(WIDTH))
    score = (one * other).sum(axis=1) + plane
    frame = pd.DataFrame(features, columns=COLUMNS)
    frame["label"] = (score > np.median(score)).astype(np.float64)
    parts = [
        spark.createDataFrame(part).repartition(WORKERS).cache()
        for part in (frame[:num_rows], frame[num_rows:])
    ]
    for part in parts:
        part.count()
    return parts[0], parts[1]


def measure(learner: Learner, train: DataFrame, test: DataFrame) -> tuple[Measurement, float]:
    """Time a fit and a transform of the whole pipeline, and measure the held-out accuracy."""
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler

    stages: list[Any] = [VectorAssembler(inputCols=COLUMNS, outputCol="features"), learner.make()]
    load, started = os.getloadavg()[0], time.monotonic()
    fitted = Pipeline(stages=stages).fit(train)
    fit_seconds = time.monotonic() - started
    started = time.monotonic()
    fitted.transform(train).write.format("noop").mode("overwrite").save()
    transform_seconds = time.monotonic() - started
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(
        fitted.transform(test)
    )
    seconds = {FIT: fit_seconds, TRANSFORM: transform_seconds}
    return Measurement(seconds, train.count(), load_average=load), accuracy


def run(
    spark: SparkSession, learners: Sequence[Learner], size: Size, rounds: int
) -> tuple[list[Round], dict[str, list[float]]]:
    train, test = make_rows(spark, size.rows)
    accuracies: dict[str, list[float]] = {learner.name: [] for learner in learners}
    warm = train.limit(1000).cache()
    for learner in learners:
        measure(learner, warm, warm)  # untimed: starts workers, compiles
    measured: list[Round] = []
    for number in range(1, rounds + 1):
        entry: Round = {}
        for learner in learners:
            entry[learner.name], accuracy = measure(learner, train, test)
            accuracies[learner.name].append(accuracy)
            seconds = entry[learner.name].seconds
            print(
                f"round {number} of {rounds}, {learner.name}: {seconds[FIT]:.1f} s to fit, "
                f"{accuracy:.1%}",
                file=sys.stderr,
            )
        measured.append(entry)
    return measured, accuracies


def to_markdown(
    rounds: Sequence[Round], accuracies: dict[str, list[float]], learners: Sequence[Learner]
) -> str:
    lines = ["| | given | fit, s | transform, s | accuracy |", "|---|---|---|---|---|"]
    for learner in learners:
        cells = []
        for metric in (FIT, TRANSFORM):
            spread = Spread.of(seconds_of(rounds, learner.name, metric))
            assert spread is not None
            cells.append(f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})")
        accuracy = Spread.of(accuracies[learner.name])
        assert accuracy is not None
        row = [learner.name, learner.given, *cells, f"{accuracy.median:.1%}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/mllib_peers.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    prepare_environment()
    logging.getLogger("XGBoost-PySpark").setLevel(logging.WARNING)
    size = QUICK if options.quick else FULL
    learners = []
    for learner in line_up(size):
        if learner.needs is not None and find_spec(learner.needs) is None:
            print(f"skipped: {learner.name}, which needs {learner.needs}", file=sys.stderr)
        else:
            learners.append(learner)
    options.results.mkdir(parents=True, exist_ok=True)
    spark = start_session()
    try:
        rounds, accuracies = run(spark, learners, size, options.rounds)
    finally:
        spark.stop()
    table = to_markdown(rounds, accuracies, learners)
    values = [{name: found.to_dict() for name, found in entry.items()} for entry in rounds]
    (options.results / "mllib.json").write_text(
        json.dumps({"rounds": values, "accuracies": accuracies}, indent=2)
    )
    (options.results / "mllib.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
