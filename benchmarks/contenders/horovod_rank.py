"""What one rank does under bare horovodrun.

`horovodrun … python -m benchmarks.contenders.horovod_rank KIND WORKLOAD_JSON FOLDER RESULT_FILE`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor

from benchmarks.allreduce import time_allreduce
from benchmarks.contenders.processes import write_training
from benchmarks.training import RankResult, combine, run_epochs, shuffled_batches
from benchmarks.workloads import Allreduce, Training, load_share, make_model


def train_from_parquet(workload: Training, folder: str) -> RankResult:
    start = time.monotonic()
    features, labels = load_share(Path(folder), hvd.rank(), hvd.size())
    load_seconds = time.monotonic() - start
    batches = shuffled_batches(features, labels, workload.batch_size, hvd.rank())
    model = make_model(workload)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=workload.learning_rate),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.barrier()  # the loop's time is not to hold a peer's slower start
    result = run_epochs(model, optimizer, batches, workload.epochs, load_seconds)
    return combine(result, _maximum, _total)


def _maximum(tensor: Tensor) -> Tensor:
    reduced: Tensor = hvd.allreduce(tensor, op=hvd.Max)
    return reduced


def _total(tensor: Tensor) -> Tensor:
    reduced: Tensor = hvd.allreduce(tensor, op=hvd.Sum)
    return reduced


def _sum_in_place(tensor: Tensor) -> None:
    # Horovod tells tensors apart by name: one that stays lets it use its response cache.
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"floats-{tensor.numel()}")


def main(kind: str, workload: str, folder: str, result_file: str) -> None:
    torch.set_num_threads(1)
    hvd.init()
    if kind == "allreduce":
        seconds = time_allreduce(Allreduce.from_json(workload), _sum_in_place)
        if hvd.rank() == 0:
            Path(result_file).write_text(json.dumps(seconds))
    else:
        result = train_from_parquet(Training.from_json(workload), folder)
        if hvd.rank() == 0:
            write_training(result, result_file)
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
