"""The limit of our own loop: our feed and its shuffle in as many workers, and no communication."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import sparkdml as dml
from benchmarks.contenders.base import Bench, Contender
from benchmarks.contenders.sparkdml_fit import SHUFFLE
from benchmarks.measurement import EPOCH_METRICS, IN_STEP, Measurement
from benchmarks.training import RankResult, as_seconds, in_step, merge, run_epochs
from benchmarks.workloads import SEED, WORKERS, Training, Workload, ensure_data, make_model


class FeedLimit(Contender):
    name = "feed-limit"
    title = "the limit of the feed: sparkdml's rows, no communication"
    shuffle = SHUFFLE

    def missing(self) -> str | None:
        return None

    def does(self, workload: Workload) -> bool:
        return isinstance(workload, Training) and workload.model != "linear"

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        assert isinstance(workload, Training)
        folder = str(ensure_data(workload, bench.cache))
        with bench.limited_spark_jobs() as spark:
            called_at = time.monotonic()
            train = partial(train_alone, workload=workload)
            ranks = dml.run(train, spark.read.parquet(folder), WORKERS, seed=SEED)
        measured = as_seconds(merge(ranks), called_at)
        # It ends with as many models as workers, so only its loop can be compared.
        loop = {name: measured.seconds[name] for name in EPOCH_METRICS if name in measured.seconds}
        if workload.epochs > 1:
            loop[IN_STEP] = statistics.median(in_step(ranks)[1:])
        return replace(measured, seconds=loop)


def train_alone(ctx: dml.Context, workload: Training) -> RankResult:
    """Runs in every worker."""

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in ctx.feed(workload.batch_size, epoch):
            yield batch["features"], batch["label"]

    model = make_model(workload)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.learning_rate)
    return run_epochs(model, optimizer, batches, workload.epochs, load_seconds=0.0)
