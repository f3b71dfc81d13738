"""sparkdml itself, through its public API, on each of its backends."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import nn

from benchmarks.allreduce import time_allreduce
from benchmarks.contenders.base import Bench, Contender, ContenderFailed
from benchmarks.measurement import FIRST_EPOCH, FIRST_STEP, LATER_EPOCHS, WHOLE_CALL, Measurement
from benchmarks.workloads import (
    SEED,
    W3,
    WORKERS,
    Allreduce,
    Training,
    Workload,
    ensure_data,
    make_model,
)
from sparkdml.comm.base import Communicator
from sparkdml.strategies.allreduce import AllReduce

SHUFFLE = (
    "the first epoch in the order of the rows' hashes, by which Spark cuts and sorts them, "
    "later ones in a random permutation"
)


class SparkdmlFit(Contender):
    ours = True
    shuffle = SHUFFLE

    def __init__(self, backend: str, topology: str | None = None) -> None:
        """By the strategy's own default where no topology is given."""
        self.backend = backend
        self.name = "-".join(("sparkdml", backend, *([topology] if topology else ())))
        self.title = f"sparkdml, {backend} backend{f', {topology}' if topology else ''}"
        chosen = {} if topology is None else {"topology": topology}
        self._strategy = partial(AllReduce, backend=backend, **chosen)

    def missing(self) -> str | None:
        from sparkdml.comm.backends import horovod_available

        if self.backend == "horovod" and not horovod_available():
            return "horovod (`sparkdml install-horovod`)"
        return None

    def warm_up(self, bench: Bench) -> None:
        self._fit(W3, bench)

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        if isinstance(workload, Allreduce):
            return self._allreduce(workload, bench)
        return self._fit(workload, bench)

    def _fit(self, workload: Training, bench: Bench) -> Measurement:
        import sparkdml as dml

        folder = str(ensure_data(workload, bench.cache))
        with bench.limited_spark_jobs() as spark:
            dataframe = spark.read.parquet(folder)
            start = time.monotonic()
            fitted = dml.TorchEstimator(
                model=partial(make_model, workload),
                loss=nn.CrossEntropyLoss(),
                optimizer=partial(torch.optim.SGD, lr=workload.learning_rate),
                featuresCol="features",
                labelCol="label",
                batchSize=workload.batch_size,
                epochs=workload.epochs,
                numWorkers=WORKERS,
                seed=SEED,
                strategy=self._strategy(),
            ).fit(dataframe)
            whole_call = time.monotonic() - start
        epochs, first_step = list(fitted.history), fitted.history.first_step_seconds
        if first_step is None:
            raise ContenderFailed("the fit's history does not say when its first step was done")
        seconds = {
            WHOLE_CALL: whole_call,
            FIRST_STEP: first_step,
            FIRST_EPOCH: epochs[0]["seconds"],
        }
        if len(epochs) > 1:
            seconds[LATER_EPOCHS] = statistics.median(row["seconds"] for row in epochs[1:])
        return Measurement(seconds, int(epochs[-1]["rows"]), float(epochs[-1]["loss"]))

    def _allreduce(self, workload: Allreduce, bench: Bench) -> Measurement:
        from sparkdml.testing.rank_processes import RankProcesses

        with RankProcesses(self.backend, WORKERS, bench.timeout_seconds) as ranks:
            return Measurement(ranks.run(time_communicator, workload.to_json())[0])


def time_communicator(communicator: Communicator, workload: str) -> dict[str, float]:
    """Runs in every rank."""
    return time_allreduce(Allreduce.from_json(workload), communicator.allreduce_)
