"""What one rank does under torchrun, with or without Spark above it: DDP on gloo.

Run as a module it is a bare script: `torchrun … -m benchmarks.contenders.ddp_rank
KIND WORKLOAD_JSON DATA_FOLDER RESULT_FILE`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.allreduce import time_allreduce
from benchmarks.contenders.processes import write_training
from benchmarks.training import Batches, RankResult, combine, run_epochs, shuffled_batches
from benchmarks.workloads import Allreduce, Training, load_share, make_model


def train_from_parquet(workload: Training, folder: str, communicate: bool = True) -> RankResult:
    """Read this rank's share of the Parquet files into memory, then train on it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start = time.monotonic()
    rank = dist.get_rank()
    features, labels = load_share(Path(folder), rank, dist.get_world_size())
    load_seconds = time.monotonic() - start
    batches = shuffled_batches(features, labels, workload.batch_size, rank)
    return _train(workload, batches, load_seconds, communicate)


def train_from_partition(workload: Training) -> RankResult:
    """Train on the Spark partition that TorchDistributor's private loader serves."""
    from pyspark.ml.torch.distributor import _get_spark_partition_data_loader

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loader = _get_spark_partition_data_loader(
        workload.rows // dist.get_world_size(), workload.batch_size
    )
    return _train(workload, lambda _epoch: loader, load_seconds=0.0, communicate=True)


def _train(
    workload: Training, batches: Batches, load_seconds: float, communicate: bool
) -> RankResult:
    model = make_model(workload)
    if communicate:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.learning_rate)
    dist.barrier()  # the loop's time is not to hold a peer's slower start
    result = run_epochs(model, optimizer, batches, workload.epochs, load_seconds)
    combined = combine(result, _maximum, _total)
    del model, optimizer
    _leave()
    return combined


def _leave() -> None:
    dist.barrier()  # a rank that leaves while its peer still reduces may take the peer down
    dist.destroy_process_group()


def _maximum(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def _total(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def main(kind: str, workload: str, folder: str, result_file: str) -> None:
    if kind == "allreduce":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        seconds = time_allreduce(Allreduce.from_json(workload), dist.all_reduce)
        _leave()
        if rank == 0:
            Path(result_file).write_text(json.dumps(seconds))
        return
    communicate = {"ddp": True, "alone": False}[kind]
    result = train_from_parquet(Training.from_json(workload), folder, communicate)
    if os.environ["RANK"] == "0":
        write_training(result, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
