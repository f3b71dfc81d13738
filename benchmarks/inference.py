"""W5, inference: `python benchmarks/inference.py --help`.

W1's MLP over W1, all columns passed through, into Spark's noop sink: `fitted.transform` against
`predict_batch_udf`, `pandas_udf`, and `mapInArrow` written by hand, in turns within one session.
All of them run the same module with one thread and add the same column: first the class, a double,
then the module's outputs, an array of floats. The scan alone shows the time without predictions.
Then `transform` runs on a quarter, a half and all of the rows, to check that its cost grows only
with the number of rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import sparkdml as dml
from benchmarks.measurement import WHOLE_CALL, Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.session import prepare_environment, start_session
from benchmarks.workloads import FULL, PART_FILES, QUICK, SEED, WORKERS, Training, ensure_data
from benchmarks.workloads import make_model as make_module

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RESULTS = Path(__file__).resolve().parent / "results"
OURS, BATCH_UDF, PANDAS = "sparkdml transform", "predict_batch_udf", "pandas_udf"
BY_HAND, SCAN = "mapInArrow by hand", "the scan alone"
CLASS, OUTPUTS = "The class, a double", "The outputs, an array of floats"
NAMES = (SCAN, PANDAS, BATCH_UDF, BY_HAND, OURS)
AT_LEAST, AIM = 1.3, 1.5
FRACTIONS = (4, 2, 1)  # of the part files, as divisors

Added = Callable[["DataFrame"], "DataFrame"]


def compute(module: nn.Module, kind: str, features: np.ndarray) -> np.ndarray:
    """The computation of every contender for a batch."""
    with torch.inference_mode():
        found = module(torch.from_numpy(features))
        array: np.ndarray = (found.argmax(dim=1).double() if kind == CLASS else found).numpy()
    return array


def column_type(kind: str) -> Any:
    from pyspark.sql.types import ArrayType, DoubleType, FloatType

    return DoubleType() if kind == CLASS else ArrayType(FloatType())


def with_batch_udf(module: nn.Module, work: Training, kind: str) -> Added:
    from pyspark.ml.functions import predict_batch_udf

    def make() -> Callable[[np.ndarray], np.ndarray]:
        torch.set_num_threads(1)
        return partial(compute, module, kind)

    function = predict_batch_udf(
        make,
        return_type=column_type(kind),
        batch_size=work.batch_size,
        input_tensor_shapes=[[work.width]],
    )
    return lambda rows: rows.withColumn("prediction", function("features"))


def with_pandas_udf(module: nn.Module, kind: str) -> Added:
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    def predict(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        torch.set_num_threads(1)
        for batch in batches:
            yield pd.Series(list(compute(module, kind, np.stack(batch.to_numpy()))))

    predict.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    function = pandas_udf(predict, column_type(kind))
    return lambda rows: rows.withColumn("prediction", function("features"))


def with_map_in_arrow(module: nn.Module, work: Training, kind: str) -> Added:
    from pyspark.sql.types import StructType

    def predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        torch.set_num_threads(1)
        for batch in batches:
            lists = batch.column("features")
            features = lists.flatten().to_numpy().reshape(len(lists), -1)
            pieces = [
                compute(module, kind, features[start : start + work.batch_size])
                for start in range(0, len(lists), work.batch_size)
            ]
            found = np.concatenate(pieces)
            values = pa.array(found.reshape(-1))
            if kind != CLASS:
                offsets = np.arange(0, found.size + 1, found.shape[1], dtype=np.int32)
                values = pa.ListArray.from_arrays(pa.array(offsets), values)
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, values],
                names=[*batch.schema.names, "prediction"],
            )

    def add(rows: DataFrame) -> DataFrame:
        schema = StructType(list(rows.schema.fields)).add("prediction", column_type(kind))
        return rows.mapInArrow(predict, schema)

    return add


def fit(rows: DataFrame, work: Training) -> dml.TorchModel:
    """A model as users have it, trained on some of the rows."""
    return dml.TorchEstimator(
        model=partial(make_module, work),
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=work.learning_rate),
        batchSize=work.batch_size,
        numWorkers=WORKERS,
        seed=SEED,
        strategy=dml.AllReduce(backend="torch"),
        verbose=0,
    ).fit(rows.limit(8 * work.batch_size))


def consume(rows: DataFrame) -> float:
    start = time.monotonic()
    rows.write.format("noop").mode("overwrite").save()
    return time.monotonic() - start


def check_same(contenders: dict[str, Added], rows: DataFrame) -> None:
    """Refuse contenders whose predictions differ."""
    from pyspark.sql import functions

    some = rows.limit(2000).cache()
    found = {}
    for name in (name for name in contenders if name != SCAN):
        predicted = contenders[name](some).select("prediction")
        if "array" in predicted.schema["prediction"].dataType.simpleString():
            predicted = predicted.select(functions.explode("prediction").alias("prediction"))
        total = predicted.agg(functions.sum("prediction"), functions.count("prediction")).first()
        assert total is not None
        found[name] = (round(total[0], 2), total[1])
    some.unpersist()
    if len(set(found.values())) != 1:
        raise AssertionError(f"the contenders predict different things: {found}")


def measure(
    rows: DataFrame, contenders: dict[str, Added], work: Training, rounds: int
) -> list[Round]:
    measured: list[Round] = []
    for number in range(rounds + 1):  # the first starts the Python workers and isn't counted
        first = number % len(NAMES)
        order = NAMES[first:] + NAMES[:first]
        entry = {
            name: Measurement({WHOLE_CALL: consume(contenders[name](rows))}, work.rows)
            for name in order
        }
        if number:
            measured.append(entry)
            text = ", ".join(f"{name} {entry[name].seconds[WHOLE_CALL]:.2f}" for name in NAMES)
            print(f"round {number} of {rounds}: {text} s", file=sys.stderr)
    return measured


def measure_growth(
    spark: SparkSession, folder: Path, add: Added, rounds: int
) -> dict[int, list[float]]:
    """Seconds by the number of part files."""
    parts = sorted(map(str, folder.glob("*.parquet")))
    seconds: dict[int, list[float]] = {len(parts) // divisor: [] for divisor in FRACTIONS}
    for _ in range(rounds):
        for count, found in seconds.items():
            found.append(consume(add(spark.read.parquet(*parts[:count]))))
    return seconds


def compare_table(rounds: list[Round], kind: str, rows: int) -> list[str]:
    lines = [
        f"## {kind}",
        "",
        "| | seconds | rows/s | times as fast as predict_batch_udf |",
        "|---|---|---|---|",
    ]
    for name in NAMES:
        spread = Spread.of(seconds_of(rounds, name, WHOLE_CALL))
        ratio = times_as_fast(rounds, name, [BATCH_UDF], WHOLE_CALL)
        assert spread is not None
        assert ratio is not None
        lines.append(
            f"| {name} | {spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f}) | "
            f"{rows / spread.median / 1000:,.0f} k | "
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"
        )
    reached = times_as_fast(rounds, OURS, [BATCH_UDF], WHOLE_CALL)
    assert reached is not None
    lines += [
        "",
        f"Target: {AT_LEAST} times predict_batch_udf; stretch goal: {AIM}; measured: "
        f"{reached.median:.2f}, the median of {len(rounds)} rounds.",
        "",
    ]
    return lines


def growth_table(growth: dict[int, list[float]], rows: int) -> list[str]:
    lines = ["## By the number of rows", ""]
    lines += ["| rows | transform, seconds | microseconds per row |", "|---|---|---|"]
    for count, found in growth.items():
        spread = Spread.of(found)
        assert spread is not None
        share = rows * count // PART_FILES
        lines.append(
            f"| {share:,} | {spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f}) | "
            f"{spread.median / share * 1e6:.2f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/inference.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    prepare_environment()
    work = (QUICK if options.quick else FULL)["W1"]
    assert isinstance(work, Training)
    options.results.mkdir(parents=True, exist_ok=True)
    spark = start_session()
    try:
        folder = ensure_data(work, options.results / "data")
        rows = spark.read.parquet(str(folder))
        fitted = fit(rows, work)
        compared: dict[str, list[Round]] = {}
        for kind in (CLASS, OUTPUTS):
            ours = fitted.copy({fitted.output: "class" if kind == CLASS else "raw"})
            contenders: dict[str, Added] = {
                SCAN: lambda rows: rows,
                PANDAS: with_pandas_udf(fitted.module, kind),
                BATCH_UDF: with_batch_udf(fitted.module, work, kind),
                BY_HAND: with_map_in_arrow(fitted.module, work, kind),
                OURS: ours.transform,
            }
            check_same(contenders, rows)
            compared[kind] = measure(rows, contenders, work, options.rounds)
        growth = measure_growth(spark, folder, fitted.transform, options.rounds)
    finally:
        spark.stop()
    lines: list[str] = []
    for kind, rounds in compared.items():
        lines += compare_table(rounds, kind, work.rows)
    table = "\n".join([*lines, *growth_table(growth, work.rows)]) + "\n"
    values = {
        "rounds": {
            kind: [{name: m.to_dict() for name, m in entry.items()} for entry in rounds]
            for kind, rounds in compared.items()
        },
        "growth": growth,
    }
    (options.results / "inference.json").write_text(json.dumps(values, indent=2))
    (options.results / "inference.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
