"""A product of two matrices over shards, beside Spark's BlockMatrix: `python benchmarks/matmul.py`.

Both start from cached rows that hold a column of A and a row of B, and end with the product at the
driver. The measured time includes building BlockMatrix's blocks and our tensors from the rows;
BlockMatrix is also measured from blocks that are already cached. They take turns in one session.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd

from benchmarks.session import prepare_environment, start_session
from benchmarks.workloads import WORKERS

if TYPE_CHECKING:
    from pyspark.mllib.linalg.distributed import BlockMatrix
    from pyspark.sql import DataFrame, SparkSession

RESULTS = Path(__file__).resolve().parent / "results"


def make_rows(spark: SparkSession, left: np.ndarray, right: np.ndarray) -> DataFrame:
    rows = pd.DataFrame({"k": range(len(right)), "a": list(left.T), "b": list(right)})
    df = spark.createDataFrame(rows).repartition(WORKERS).cache()
    df.count()
    return df


def to_blocks(df: DataFrame, block: int) -> tuple[BlockMatrix, BlockMatrix]:
    """Rows of A's transpose and of B as block matrices; no row leaves the JVM."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.mllib.linalg.distributed import IndexedRowMatrix
    from pyspark.mllib.util import MLUtils

    def blocks(column: str) -> BlockMatrix:
        rows = df.select("k", array_to_vector(column).alias(column))
        return IndexedRowMatrix(MLUtils.convertVectorColumnsFromML(rows, column)).toBlockMatrix(
            block, block
        )

    return blocks("a").transpose(), blocks("b")


def take_turns(
    contenders: dict[str, Callable[[], Any]], expected: np.ndarray, rounds: int
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):  # the first, a warm-up, is not counted
        for name, compute in contenders.items():
            began = time.perf_counter()
            found = compute()
            seconds = time.perf_counter() - began
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
            if number:
                taken[name].append(seconds)
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/matmul.py", description=__doc__)
    parser.add_argument("--outer", type=int, default=1000, help="rows of A and columns of B")
    parser.add_argument("--inner", type=int, default=4000, help="columns of A and rows of B")
    parser.add_argument("--block", type=int, default=500, help="of BlockMatrix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the table")
    options = parser.parse_args(argv)
    prepare_environment()
    options.results.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(3)
    left = generator.normal(size=(options.outer, options.inner))
    right = generator.normal(size=(options.inner, options.outer))
    spark = start_session()
    try:
        from sparkdml.linalg.multiply import multiply

        df = make_rows(spark, left, right)
        a, b = to_blocks(df, options.block)
        a.cache(), b.cache()
        a.blocks.count(), b.blocks.count()

        def from_rows() -> np.ndarray:
            one, other = to_blocks(df, options.block)
            one.cache(), other.cache()  # as Spark asks for: it looks at the blocks twice
            product = np.asarray(one.multiply(other).toLocalMatrix().toArray())
            one.blocks.unpersist(), other.blocks.unpersist()
            return product

        contenders: dict[str, Callable[[], Any]] = {
            "sparkdml": lambda: multiply(df, "a", "b", num_workers=WORKERS).numpy(),
            "BlockMatrix": from_rows,
            "BlockMatrix, blocks cached": lambda: a.multiply(b).toLocalMatrix().toArray(),
            "numpy at the driver": lambda: left @ right,
        }
        taken = take_turns(contenders, left @ right, options.rounds)
    finally:
        spark.stop()
    lines = [
        f"| {options.outer} x {options.inner} times {options.inner} x {options.outer}, doubles "
        "| median s | all |",
        "|---|---|---|",
    ]
    for name, seconds in taken.items():
        listed = ", ".join(f"{one:.2f}" for one in seconds)
        lines.append(f"| {name} | {median(seconds):.2f} | {listed} |")
    table = "\n".join(lines) + "\n"
    (options.results / "matmul.md").write_text(table)
    (options.results / "matmul.json").write_text(json.dumps(taken, indent=2))
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
