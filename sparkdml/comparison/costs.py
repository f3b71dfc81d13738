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
    """The cost of a message in seconds: `latency`, and the time per byte."""

    latency: float
    seconds_per_byte: float

    @classmethod
    def fit(cls, size: int, small: float, large: float, num_bytes: int) -> Network:
        """From an allreduce of next to nothing and one of `num_bytes`, among `size` ranks."""
        if size < 2:
            return cls(0.0, 0.0)
        moved = 2 * (size - 1) / size * num_bytes
        return cls(small / (2 * (size - 1)), max(0.0, large - small) / moved)

    def allreduce(self, workers: int, num_bytes: float) -> float:
        """Seconds of a ring among `size` workers."""
        if workers < 2:
            return 0.0
        moved = 2 * (workers - 1) / workers * num_bytes
        return 2 * (workers - 1) * self.latency + moved * self.seconds_per_byte


@dataclass(frozen=True)
class Agreement:
    """How a strategy changes a synchronous step: how often ranks send how much, and their work."""

    strategy: str  # as it is written
    steps: int = 1  # between two synchronizations
    bytes_kept: float = 1.0  # of the gradients' bytes
    balances: bool = False  # whether rows move from slow ranks to quick ones


SYNCHRONOUS = Agreement("AllReduce()")
HALVED = Agreement("AllReduce(compression=dml.FP16())", bytes_kept=0.5)
BALANCED = Agreement("AdaptiveBalance()", balances=True)


def local(steps: int) -> Agreement:
    return Agreement(f"LocalSGD(steps={steps})", steps=steps)


@dataclass(frozen=True)
class Measured:
    """What was measured on the cluster, in seconds."""

    rows: int  # to train on
    batch_size: int  # of a worker and step, gradients that are accumulated included
    model_bytes: int  # of the gradients
    step_alone: float  # of a worker while the others rest: read, forward, backward, apply
    concurrent_steps: tuple[float, ...]  # seconds per worker when all step at once
    max_workers: int
    hand_over: float  # from the call until every worker had its rows
    network: Network  # as strategies use it
    topology: str = "native"  # what they reduce by

    @property
    def slowest(self) -> float:
        """The step of the worker that the others wait for."""
        return max(self.concurrent_steps)

    @property
    def balanced(self) -> float:
        """A step of as many rows, had each worker the part of them that its speed allows."""
        return len(self.concurrent_steps) / sum(1.0 / each for each in self.concurrent_steps)

    def step(self, workers: int, agreement: Agreement = SYNCHRONOUS) -> float:
        """Without communication: workers on one host get in each other's way."""
        if self.max_workers < 2:
            return self.step_alone
        together = self.balanced if agreement.balances else self.slowest
        share = (workers - 1) / (self.max_workers - 1)
        return self.step_alone + share * (together - self.step_alone)

    def communication(self, workers: int, agreement: Agreement = SYNCHRONOUS) -> float:
        """Of a step, not hidden behind computation."""
        sent = agreement.bytes_kept * self.model_bytes
        return self.network.allreduce(workers, sent) / agreement.steps

    def epoch(self, workers: int, agreement: Agreement = SYNCHRONOUS) -> float:
        """Seconds of a pass over the spooled rows, with `batch_size` rows a worker and step."""
        step = self.step(workers, agreement) + self.communication(workers, agreement)
        return self.steps_per_epoch(workers) * step

    def steps_per_epoch(self, workers: int) -> int:
        return -(-self.rows // (workers * self.batch_size))

    def speedup(self, workers: int, agreement: Agreement = SYNCHRONOUS) -> float:
        return self.epoch(1) / self.epoch(workers, agreement)

    def workers_that_pay(self, agreement: Agreement = SYNCHRONOUS) -> int:
        """The most of which each brings enough: beyond, they mostly wait."""
        paying = [
            n
            for n in range(2, self.max_workers + 1)
            if self.speedup(n, agreement) >= max(1.1, PAYS * n)
        ]
        return max(paying, default=1)

    def communication_share(self, workers: int) -> float:
        """Of synchronous SGD's time."""
        spent = self.communication(workers)
        return spent / (spent + self.step(workers)) if spent else 0.0
