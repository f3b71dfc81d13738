"""What follows from the measured costs: how many workers, which strategy, in plain sentences."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comparison.costs import Measured

SHORT_SECONDS = 20.0  # a training that one process ends in this time needs no second one
LITTLE = 0.25  # of a step spent on communication: not worth a thought
MUCH = 0.6  # so much that only agreeing less often helps
UNEVEN = 1.5  # times the median: a rank that the others wait for
ENOUGH = 0.1  # of a step is what local steps may leave to communication


@dataclass(frozen=True)
class Advice:
    """The numbers, and what they mean for `epochs` passes over the data."""

    measured: Measured
    epochs: int

    @property
    def workers(self) -> int:
        """How many to ask for."""
        return self.measured.workers_that_pay

    @property
    def is_needed(self) -> bool:
        """Whether several workers are worth their while at all."""
        return self.workers > 1 and self.epochs * self.measured.epoch(1) > SHORT_SECONDS

    @property
    def strategy(self) -> str:
        """What to pass as strategy=, as it is written."""
        measured, size = self.measured, max(2, self.measured.max_workers)
        if measured.max_workers < 2:
            return "AllReduce()"
        if measured.slowest_together > UNEVEN * measured.step_together:
            return "AdaptiveBalance()"
        share = measured.communication_share(size)
        if share < LITTLE:
            return "AllReduce()"
        if share < MUCH and self._by_bytes:
            return "AllReduce(compression=dml.FP16())"
        return f"LocalSGD(steps={self.local_steps})"

    @property
    def local_steps(self) -> int:
        """Steps between two meetings after which communication costs little: a power of two."""
        measured, size = self.measured, max(2, self.measured.max_workers)
        ratio = measured.communication(size) / max(measured.step(size), 1e-9)
        return int(2 ** math.ceil(math.log2(max(2.0, ratio / ENOUGH))))

    @property
    def _by_bytes(self) -> bool:
        """Whether an allreduce spends its time on bytes that travel, rather than on messages.

        In shared memory, making them fewer takes as long as adding them up.
        """
        network, size = self.measured.network, self.measured.max_workers
        if self.measured.topology == SharedMemoryCommunicator.topology:
            return False
        return network.allreduce(size, 0.0) < 0.5 * self.measured.communication(size)

    def describe(self) -> list[str]:
        measured, size = self.measured, self.measured.max_workers
        sentences = [
            f"A step of {measured.batch_size:,} rows takes {_time(measured.step_alone)} on one "
            f"worker alone; an epoch of {measured.rows:,} rows {_time(measured.epoch(1))}, "
            f"{self.epochs} epochs {_time(self.epochs * measured.epoch(1))}.",
            f"Spark hands the rows over in {_time(measured.first_read)} "
            f"({measured.read_rate:,.0f} rows/s); that is paid once, whatever the strategy.",
        ]
        if size < 2:
            return [*sentences, "The cluster has one slot for it, so there is nothing to share."]
        spent = measured.communication(size)
        sentences.append(
            f"Among {size} workers a step takes {_time(measured.step(size))}, and an allreduce of "
            f"the {measured.model_bytes / 1e6:,.3g} MB of gradients ({measured.topology}) "
            f"{_time(spent)}: "
            f"{measured.communication_share(size):.0%} of the time goes to communication, and an "
            f"epoch is {measured.speedup(size):.2g} times as fast as on one worker."
        )
        sentences.append(self._verdict())
        if measured.slowest_together > UNEVEN * measured.step_together:
            sentences.append(
                f"The slowest worker takes {measured.slowest_together / measured.step_together:.1f}"
                " times as long for a step as the median: the others wait for it in every step."
            )
        sentences.append(f"Strategy: dml.{self.strategy}.")
        return sentences

    def _verdict(self) -> str:
        measured, alone = self.measured, self.epochs * self.measured.epoch(1)
        if self.workers == 1:
            why = (
                "workers on one host take each other's processors"
                if measured.step(measured.max_workers) > 1.5 * measured.step_alone
                else "communication eats what they bring"
            )
            return f"Distribution is not needed: more workers would not be faster, since {why}."
        if not self.is_needed:
            return (
                f"Distribution is not needed: one worker is done in {_time(alone)}. "
                f"If it were, {self.workers} workers would pay."
            )
        return (
            f"Distribution pays: numWorkers={self.workers} brings {self.epochs} epochs down to "
            f"{_time(self.epochs * measured.epoch(self.workers))}."
        )

    def __repr__(self) -> str:
        return "\n".join(self.describe())

    def _repr_html_(self) -> str:
        sentences = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.describe())
        return f'<ul class="sparkdml-advice">{sentences}</ul>'


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
