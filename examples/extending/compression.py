"""Your own compressor: `python examples/extending/compression.py`.

Each step sends one block of every bucket, drawn at random, and keeps the rest as the residual that
a later step sends (error feedback). All ranks draw the same block, so their blocks add up by a
plain allreduce, over any topology, and the exchange overlaps with backward. (The random block of
Vogels, Karimireddy and Jaggi 2019, arXiv 1905.13727; sparsified SGD with memory as in Stich,
Cordonnier and Jaggi 2018, arXiv 1809.07599.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sparkdml as dml
from sparkdml.extending import (
    Bucket,
    Communicator,
    Compression,
    Entry,
    FlatParams,
    Reducer,
    ResidualReducer,
    State,
)


def draw_block(seed: int, num_numbers: int, length: int) -> slice:
    """One of the blocks that `num_numbers` are cut into; the same for the same seed."""
    num_blocks = -(-num_numbers // length)
    generator = torch.Generator().manual_seed(seed)
    start = length * int(torch.randint(num_blocks, (), generator=generator))
    return slice(start, min(start + length, num_numbers))


class RandomBlockReducer(ResidualReducer):
    """One per rank and run. The base class keeps the residuals and sends the stats exactly."""

    def __init__(
        self, fraction: float, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]
    ) -> None:
        super().__init__(comm, params, buckets)
        self._lengths = [max(1, round(fraction * bucket.grads.numel())) for bucket in buckets]
        self._num_sent = [0] * len(buckets)  # how often each bucket was sent: seeds the draw

    def begin(self, index: int, wanted: Tensor, rows: float) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin an allreduce of the block; the function ends it, on the thread that waits."""
        seed = 1_000_003 * index + self._num_sent[index]
        self._num_sent[index] += 1
        block = draw_block(seed, len(wanted), self._lengths[index])
        summed = wanted[block].clone()
        work = self.comm.allreduce_async_(summed)

        def end() -> tuple[Tensor, Tensor]:
            work.wait()
            sent, total = torch.zeros_like(wanted), torch.zeros_like(wanted)
            sent[block], total[block] = wanted[block], summed
            return sent, total

        return end

    def state(self) -> State:
        """The residuals, which are each rank's own, and the counts, which are the same on all."""
        return {**super().state(), "num_sent": Entry(self._num_sent)}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        lost = super().load(state)
        num_sent = state.get("num_sent", self._num_sent)
        if len(num_sent) != len(self._num_sent):
            return [*lost, "counts"]
        self._num_sent = list(num_sent)
        return lost


@dataclass(frozen=True)
class RandomBlock(Compression):
    """Send one block of each bucket, drawn at random, with error feedback.

    Args:
        fraction: how much of each bucket a block is, above 0 and at most 1.
    """

    fraction: float = 0.25
    any_topology: ClassVar[bool] = True  # it communicates by allreduce alone
    has_residuals: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise dml.ParameterError("fraction", self.fraction, "above 0 and at most 1")

    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        return RandomBlockReducer(self.fraction, comm, params, buckets)


def read_digits(spark: SparkSession) -> DataFrame:
    data = load_digits()
    return spark.createDataFrame(
        pd.DataFrame({"features": list((data.data / 16).astype("float32")), "label": data.target})
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float()


def train(rows: DataFrame, compression: Compression | None, epochs: int) -> dml.TorchModel:
    return dml.TorchEstimator(
        model=network,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.2),
        strategy=dml.AllReduce(compression=compression),
        metrics={"accuracy": accuracy},
        batchSize=32,
        epochs=epochs,
        numWorkers=2,
        seed=7,
    ).fit(rows)


def main() -> None:
    spark = dml.session_builder("your own compressor").getOrCreate()
    rows = read_digits(spark).cache()
    for compression in (None, RandomBlock(0.25)):
        found = train(rows, compression, epochs=10).history.accuracy[-1]
        print(f"compression={compression}: training accuracy {found:.1%}")
    spark.stop()


if __name__ == "__main__":
    main()
