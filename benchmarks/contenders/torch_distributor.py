"""pyspark's TorchDistributor in cluster mode, with its data in two ways.

Both take the session that sparkdml takes. The loader for DataFrames is private in pyspark, but
it is the only one there is.
"""

from __future__ import annotations

import importlib.util
import time
from abc import abstractmethod
from dataclasses import replace
from typing import Any

from benchmarks.contenders.base import Bench, Contender
from benchmarks.contenders.ddp_rank import train_from_parquet, train_from_partition
from benchmarks.measurement import WHOLE_CALL, Measurement
from benchmarks.training import RankResult, as_seconds
from benchmarks.workloads import W3, WORKERS, Training, Workload, ensure_data


class _Distributor(Contender):
    packaged = True

    def missing(self) -> str | None:
        if importlib.util.find_spec("pyspark") is None:
            return "pyspark (`pip install sparkdml[spark]`)"
        return None

    def does(self, workload: Workload) -> bool:
        return isinstance(workload, Training)  # its allreduce is torchrun's

    def warm_up(self, bench: Bench) -> None:
        self.measure(W3, bench)

    def measure(self, workload: Workload, bench: Bench) -> Measurement:
        assert isinstance(workload, Training)
        from pyspark.ml.torch.distributor import TorchDistributor

        folder = str(ensure_data(workload, bench.cache))
        with bench.limited_spark_jobs() as spark:
            dataframe = spark.read.parquet(folder)
            called_at = time.monotonic()
            distributor = TorchDistributor(WORKERS, local_mode=False, use_gpu=False)
            result = self.call(distributor, workload, folder, dataframe)
            whole_call = time.monotonic() - called_at
        measured = as_seconds(result, called_at)
        return replace(measured, seconds={WHOLE_CALL: whole_call, **measured.seconds})

    @abstractmethod
    def call(
        self, distributor: Any, workload: Training, folder: str, dataframe: Any
    ) -> RankResult: ...


class DistributorReadingParquet(_Distributor):
    name = "torch-distributor"
    title = "TorchDistributor, cluster mode, reads Parquet itself"
    shuffle = "a random permutation of the rank's rows, every epoch"

    def call(
        self,
        distributor: Any,
        workload: Training,
        folder: str,
        dataframe: Any,
    ) -> RankResult:
        result: RankResult = distributor.run(train_from_parquet, workload, folder)
        return result


class DistributorOnDataFrame(_Distributor):
    name = "torch-distributor-dataframe"
    title = "TorchDistributor, its private DataFrame loader"
    shuffle = "none after Spark's repartition"

    def call(
        self,
        distributor: Any,
        workload: Training,
        folder: str,
        dataframe: Any,
    ) -> RankResult:
        partitions = dataframe.repartition(WORKERS)  # it demands one partition a process
        result: RankResult = distributor._train_on_dataframe(
            train_from_partition, partitions, workload
        )
        return result
