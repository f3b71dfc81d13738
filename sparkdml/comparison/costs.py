"""What a step costs on one worker and on many: pure arithmetic on measured times.

A ring-allreduce of S bytes over n ranks takes 2(n-1) messages one after the other and moves
2(n-1)/n S bytes through each rank (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). From
one small and one large allreduce on the cluster's own ranks follow the latency and the bandwidth,
and from them the time on any other number of ranks. Ranks that reduce otherwise, in shared memory
say, are taken for a ring whose messages cost what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

PAYS = 0.5  # a worker must bring at least this share of what the first one brings


@dataclass(frozen=True)
class Network:
    """What a message costs: `latency` for itself, and so many seconds for each byte."""

    latency: float
    seconds_a_byte: float

    @classmethod
    def fit(cls, size: int, small: float, large: float, num_bytes: int) -> Network:
        """From an allreduce of next to nothing and one of `num_bytes`, among `size` ranks."""
        if size < 2:
            return cls(0.0, 0.0)
        moved = 2 * (size - 1) / size * num_bytes
        return cls(small / (2 * (size - 1)), max(0.0, large - small) / moved)

    def allreduce(self, workers: int, num_bytes: float) -> float:
        """Seconds of a ring among so many workers."""
        if workers < 2:
            return 0.0
        moved = 2 * (workers - 1) / workers * num_bytes
        return 2 * (workers - 1) * self.latency + moved * self.seconds_a_byte


@dataclass(frozen=True)
class Measured:
    """What was measured on the cluster, in seconds."""

    rows: int  # to train on
    batch_size: int  # of a worker and step, gradients that are accumulated included
    model_bytes: int  # of the gradients
    max_workers: int
    step_alone: (
        float  # of one worker that has the cluster to itself: read, forward, backward, apply
    )
    step_together: float  # the median rank, when all step at the same time
    slowest_together: float  # the slowest rank
    read_rate: float  # rows a second out of Spark, all workers together
    network: Network  # as strategies use it
    topology: str = "native"  # what they reduce by

    def step(self, workers: int) -> float:
        """Without communication: workers on one host get in each other's way."""
        if self.max_workers < 2:
            return self.step_alone
        share = (workers - 1) / (self.max_workers - 1)
        return self.step_alone + share * (self.step_together - self.step_alone)

    def communication(self, workers: int) -> float:
        """Of a step with synchronous SGD, not hidden behind computation."""
        return self.network.allreduce(workers, self.model_bytes)

    def epoch(self, workers: int) -> float:
        """Seconds of a pass over the spooled rows, with `batch_size` rows a worker and step."""
        steps = -(-self.rows // (workers * self.batch_size))
        return steps * (self.step(workers) + self.communication(workers))

    def speedup(self, workers: int) -> float:
        return self.epoch(1) / self.epoch(workers)

    @property
    def first_read(self) -> float:
        """Seconds that Spark takes to hand over the rows, before they are spooled."""
        return self.rows / self.read_rate

    @property
    def workers_that_pay(self) -> int:
        """The most of which each brings enough: beyond, they mostly wait."""
        paying = [
            n for n in range(2, self.max_workers + 1) if self.speedup(n) >= max(1.1, PAYS * n)
        ]
        return max(paying, default=1)

    def communication_share(self, workers: int) -> float:
        spent = self.communication(workers)
        return spent / (spent + self.step(workers)) if spent else 0.0
