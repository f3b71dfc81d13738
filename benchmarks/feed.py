"""The speed of the feed alone, in rows per second: `python benchmarks/feed.py --help`.

The first epoch comes from Spark's stream, so it is measured against `mapInArrow` that only counts
rows; later epochs come from the spool. Time is measured inside the tasks, and the slowest task
counts: Spark's work before a task receives its first row is the same for all contenders, and is not
included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run by its path: the repository isn't on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa

import sparkdml as dml
from benchmarks.measurement import FIRST_EPOCH, LATER_EPOCHS, Measurement
from benchmarks.ratios import Round, Spread, seconds_of, times_as_fast
from benchmarks.session import prepare_environment, start_session
from benchmarks.workloads import FULL, QUICK, SEED, WORKERS, Training, ensure_data

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESULTS = Path(__file__).resolve().parent / "results"
STREAM, SPOOL = FIRST_EPOCH, LATER_EPOCHS
REPARTITIONED, SHARDED = "mapInArrow after repartition", "mapInArrow on the feed's own shards"
_SECONDS = "seconds"


def count_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    start = time.monotonic()
    rows = sum(batch.num_rows for batch in batches)
    taken = time.monotonic() - start
    yield pa.record_batch({"rows": pa.array([rows]), "seconds": pa.array([taken])})


def time_map_in_arrow(partitions: DataFrame) -> Measurement:
    counted = partitions.mapInArrow(count_rows, "rows long, seconds double", barrier=True)
    tasks = counted.collect()
    slowest = max(task["seconds"] for task in tasks)
    return Measurement({_SECONDS: slowest}, sum(task["rows"] for task in tasks))


def time_epochs(ctx: dml.Context) -> list[tuple[int, float]]:
    """Runs in every worker: (rows, seconds) of three epochs."""
    epochs = []
    for epoch in range(3):
        start = time.monotonic()
        rows = sum(batch.num_rows for batch in ctx.feed(1024, epoch))
        epochs.append((rows, time.monotonic() - start))
    return epochs


def time_feed(dataframe: DataFrame) -> dict[str, Measurement]:
    ranks = dml.run(time_epochs, dataframe, WORKERS, seed=SEED)
    epochs = [
        Measurement(
            {_SECONDS: max(seconds for _, seconds in epoch)}, sum(rows for rows, _ in epoch)
        )
        for epoch in zip(*ranks, strict=True)
    ]
    later = statistics.median(epoch.seconds[_SECONDS] for epoch in epochs[1:])
    return {STREAM: epochs[0], SPOOL: Measurement({_SECONDS: later}, epochs[-1].rows)}


def measure_round(dataframe: DataFrame) -> Round:
    from sparkdml.feed.sharding import shard_dataframe
    from sparkdml.runtime.api import make_feed_plan

    plan = make_feed_plan(dataframe, None, SEED)
    assert plan is not None
    return {
        REPARTITIONED: time_map_in_arrow(dataframe.repartition(WORKERS)),
        SHARDED: time_map_in_arrow(shard_dataframe(dataframe, plan, WORKERS)),
        **time_feed(dataframe),
    }


def to_markdown(rounds: list[Round], rows: int) -> str:
    lines = [
        "| | rows/s, median | times as fast as mapInArrow on the same shards |",
        "|---|---|---|",
    ]
    for name in (REPARTITIONED, SHARDED, STREAM, SPOOL):
        spread = Spread.of(seconds_of(rounds, name, _SECONDS))
        ratio = times_as_fast(rounds, name, [SHARDED], _SECONDS)
        assert spread is not None
        assert ratio is not None
        lines.append(
            f"| {name} | {rows / spread.median:,.0f} | "
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks/feed.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it works")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for data and tables")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1 but got {options.rounds}")
    prepare_environment()
    workload = (QUICK if options.quick else FULL)["W1"]
    assert isinstance(workload, Training)
    options.results.mkdir(parents=True, exist_ok=True)
    spark = start_session()
    try:
        dataframe = spark.read.parquet(str(ensure_data(workload, options.results / "data")))
        measure_round(dataframe)  # untimed: starts the Python workers
        rounds = [measure_round(dataframe) for _ in range(options.rounds)]
    finally:
        spark.stop()
    for entry in rounds:
        for name, measured in entry.items():
            if measured.rows != workload.rows:
                print(f"{name} saw {measured.rows} of {workload.rows} rows", file=sys.stderr)
                return 1
    table = to_markdown(rounds, workload.rows)
    values = [{name: measured.to_dict() for name, measured in entry.items()} for entry in rounds]
    (options.results / "feed.json").write_text(json.dumps(values, indent=2))
    (options.results / "feed.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
