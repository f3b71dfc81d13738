"""What all workers must know of the rows before the first batch, where Spark can't tell it.

Runs in workers, on the thread that trains, as collectives that all ranks make together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from sparkdml.comm.base import Communicator
from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.feed.feed import Feed


class Worker(Protocol):
    """The part of a context that is needed here: asking for `comm` opens it, on every rank."""

    device: torch.device

    @property
    def comm(self) -> Communicator: ...


def read_all_first(feed: Feed, worker: Worker) -> None:
    """Read, preprocess and check every row now, if the plan asks for it; all ranks at once."""
    plan = feed.plan
    if not plan.reads_all_first:
        return
    feed.ingest()  # a row that preprocess or a check fails on ends the run here
    if plan.check_finite:
        _check_finite(feed, worker)
    if plan.sampling is not None:
        feed.agree_on_draws(lambda sums: _sum(sums, worker))


def _check_finite(feed: Feed, worker: Worker) -> None:
    own = {"rows": feed.num_rows + feed.num_validation_rows, "found": dict(feed.not_finite)}
    ranks = exchange(own, worker)
    found: Counter[str] = Counter()
    for rank in ranks:
        found.update(rank["found"])
    if found:
        total = sum(rank["rows"] for rank in ranks)
        columns = ", ".join(
            f"column {name!r} has NaN or infinity in {count:,}" for name, count in found.items()
        )
        raise DataError(
            f"{columns} of {total:,} rows. Drop or fill such rows (df.na handles NaN), or leave "
            "checkFinite out"
        )


def check_any_full(batches: Iterator[Batch], batch_size: int, worker: Worker) -> Iterator[Batch]:
    """The batches, if any rank has one at all: with dropLast small data may vanish."""
    first = next(batches, None)
    if not any(exchange(first is not None, worker)):
        raise DataError(
            f"dropLast=True leaves no batch at all: no worker has {batch_size:,} rows to train on, "
            "which is what one step takes (batchSize, times gradientAccumulation). Lower batchSize "
            "or numWorkers, or keep the last batch"
        )
    return iter(()) if first is None else chain([first], batches)


def _sum(sums: np.ndarray, worker: Worker) -> np.ndarray:
    """Each shard has one owner, so that adding up is exact."""
    total: np.ndarray = (
        worker.comm.allreduce_(torch.from_numpy(sums).to(worker.device)).cpu().numpy()
    )
    return total


def exchange(value: Any, worker: Worker) -> list[Any]:
    """Every rank's value, in rank order."""
    words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    from_all = worker.comm.allgather(words.to(worker.device))
    return [json.loads(bytes(part.cpu().tolist())) for part in from_all]
