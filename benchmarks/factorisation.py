"""Matrix factorisation beside MLlib's ALS: `python benchmarks/factorisation.py --help`.

The ratings are MovieLens-100k's (`movielens-100k/u.data` in --data or SPARKDML_DATA), or made up
with --quick. Each round splits them again, four fifths for training; all contenders train on the
same cached rows, in turns within one session, and are judged by the root mean square error of the
same test ratings, whose user and item both occur in the training data. Predictions are not clipped
to one to five stars. The whole call is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd

import sparkdml as dml
from benchmarks.ratios import Spread
from benchmarks.session import prepare_environment, start_session
from benchmarks.workloads import SEED, WORKERS
from sparkdml.programs.base import read_columns
from sparkdml.programs.factorisation import factorise, predict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "sparkdml, blocks"


@dataclass(frozen=True)
class Contender:
    """`predict_after_fit(training rows, test ratings)` returns predictions and seconds."""

    name: str
    given: str
    predict_after_fit: Callable[[DataFrame, pd.DataFrame], tuple[np.ndarray[Any, Any], float]]


@dataclass(frozen=True)
class Blocks:
    """Runs in each worker: reads its rows of the DataFrame, then runs the program."""

    shape: tuple[int, int]
    rank: int
    epochs: int

    def __call__(self, ctx: dml.Context, store: dml.KVStore) -> Any:
        user, item, rating = read_columns(ctx, "user", "item", "rating")
        factors = factorise(
            store, ctx.comm, user, item, rating, self.shape, self.rank, epochs=self.epochs
        )
        if ctx.rank:
            return None
        users, items = (
            np.concatenate([rows for _, rows in table.blocks(4096)])
            for table in (factors.users, factors.items)
        )
        return users, items, factors.mean


def fit_blocks(
    shape: tuple[int, int], rank: int, epochs: int, rows: DataFrame, unseen: pd.DataFrame
) -> tuple[np.ndarray[Any, Any], float]:
    started = time.monotonic()
    results = dml.run(
        dml.WithStore(Blocks(shape, rank, epochs)), data=rows, num_workers=WORKERS, seed=SEED
    )
    seconds = time.monotonic() - started
    users, items, mean = results[0]
    return predict(users, items, unseen.user.to_numpy(), unseen.item.to_numpy(), mean), seconds


def fit_als(
    rank: int, regularisation: float, iterations: int, rows: DataFrame, unseen: pd.DataFrame
) -> tuple[np.ndarray[Any, Any], float]:
    from pyspark.ml.recommendation import ALS

    started = time.monotonic()
    fitted = ALS(
        userCol="user",
        itemCol="item",
        ratingCol="rating",
        rank=rank,
        regParam=regularisation,
        maxIter=iterations,
        seed=SEED,
    ).fit(rows)
    seconds = time.monotonic() - started
    numbered = rows.sparkSession.createDataFrame(unseen.reset_index(names="number"))
    found = fitted.transform(numbered).select("number", "prediction").toPandas()
    return found.set_index("number").prediction.loc[unseen.index].to_numpy(), seconds


def line_up(shape: tuple[int, int], epochs: int, iterations: int) -> list[Contender]:
    ours = Contender(OURS, f"rank 16, {epochs} epochs", partial(fit_blocks, shape, 16, epochs))
    theirs = [
        Contender(
            f"ALS, rank {rank}, regParam {regularisation}",
            f"{iterations} iterations",
            partial(fit_als, rank, regularisation, iterations),
        )
        for rank, regularisation in ((10, 0.1), (16, 0.1), (50, 0.1), (10, 0.15))
    ]
    return [ours, *theirs]


def read_movielens(folder: Path) -> pd.DataFrame:
    names = ["user", "item", "rating", "time"]
    read = pd.read_csv(folder / "u.data", sep="\t", names=names, header=None)
    read = read[pd.to_numeric(read.user, errors="coerce").notna()]  # the file may have a header
    kinds = {"user": np.int64, "item": np.int64, "rating": np.float32}
    return read[list(kinds)].astype(kinds)


def make_up_ratings(num_rows: int = 8_000) -> pd.DataFrame:
    dice = np.random.default_rng(SEED)
    users, items = dice.integers(0, 200, num_rows), dice.integers(0, 150, num_rows)
    tastes, films = dice.normal(size=(200, 2)), dice.normal(size=(150, 2))
    rating = 3.5 + (tastes[users] * films[items]).sum(axis=1) + 0.3 * dice.normal(size=num_rows)
    frame = pd.DataFrame({"user": users, "item": items, "rating": rating.astype(np.float32)})
    return frame.drop_duplicates(["user", "item"], ignore_index=True)


def cut(ratings: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split into training and test ratings; the latter have only users and items of the former."""
    learns = np.random.default_rng(seed).random(len(ratings)) < 0.8
    known, unseen = ratings[learns], ratings[~learns]
    return known, unseen[unseen.user.isin(known.user) & unseen.item.isin(known.item)]


def run(
    spark: SparkSession, contenders: Sequence[Contender], ratings: pd.DataFrame, rounds: int
) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {
        each.name: {"error": [], "seconds": []} for each in contenders
    }
    for number in range(rounds + 1):  # the first one is untimed: starts workers, compiles
        known, unseen = cut(ratings, SEED + number)
        rows = spark.createDataFrame(known).repartition(WORKERS).cache()
        rows.count()
        for each in contenders:
            predicted, seconds = each.predict_after_fit(rows, unseen)
            error = float(np.sqrt(np.mean((predicted - unseen.rating.to_numpy()) ** 2)))
            print(f"round {number}, {each.name}: {error:.4f}, {seconds:.1f} s", file=sys.stderr)
            if number:
                found[each.name]["error"].append(error)
                found[each.name]["seconds"].append(seconds)
        rows.unpersist()
    return found


def to_markdown(found: dict[str, dict[str, list[float]]], contenders: Sequence[Contender]) -> str:
    lines = ["| | given | root mean square error | whole call, s |", "|---|---|---|---|"]
    for each in contenders:
        cells = []
        for metric, digits in (("error", 4), ("seconds", 2)):
            spread = Spread.of(found[each.name][metric])
            assert spread is not None
            numbers = (spread.median, spread.low, spread.high)
            median, low, high = (f"{number:.{digits}f}" for number in numbers)
            cells.append(f"{median} ({low} to {high})")
        lines.append(f"| {' | '.join([each.name, each.given, *cells])} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/factorisation.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPARKDML_DATA"))
    parser.add_argument("--quick", action="store_true", help="made-up ratings, few iterations")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    if not options.quick and options.data is None:
        parser.error("--data, or SPARKDML_DATA, must name a folder with movielens-100k/u.data")
    prepare_environment()
    if options.quick:
        ratings, epochs, iterations = make_up_ratings(), 15, 3
    else:
        ratings = read_movielens(Path(options.data) / "movielens-100k")
        epochs, iterations = 30, 10
    shape = int(ratings.user.max()) + 1, int(ratings.item.max()) + 1
    contenders = line_up(shape, epochs, iterations)
    options.results.mkdir(parents=True, exist_ok=True)
    spark = start_session()
    try:
        found = run(spark, contenders, ratings, options.rounds)
    finally:
        spark.stop()
    table = to_markdown(found, contenders)
    (options.results / "factorisation.json").write_text(json.dumps(found, indent=2))
    (options.results / "factorisation.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
