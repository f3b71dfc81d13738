"""What follows from the measured costs: how many workers, which strategy, in plain sentences."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from sparkdml.comm.shared_memory.communicator import SharedMemoryCommunicator
from sparkdml.comparison.costs import BALANCED, HALVED, SYNCHRONOUS, Agreement, Measured, local

SHORT_SECONDS = 20.0  # a training that one process ends in this time needs no second one
LITTLE = 0.25  # of a step spent on communication: not worth a thought
MUCH = 0.6  # so much that only agreeing less often helps
UNEVEN = 1.3  # how many times as fast a step would be, did rows move to the quicker workers
ENOUGH = 0.1  # of a step is what local steps may leave to communication


@dataclass(frozen=True)
class Advice:
    """The numbers, and what they mean for `epochs` passes over the data."""

    measured: Measured
    epochs: int

    @property
    def workers(self) -> int:
        """How many to ask for, with the strategy that is advised."""
        return self.measured.workers_that_pay(self.agreement)

    @property
    def is_needed(self) -> bool:
        """Whether several workers are worth their while at all."""
        return self.workers > 1 and self.epochs * self.measured.epoch(1) > SHORT_SECONDS

    @property
    def strategy(self) -> str:
        """What to pass as strategy=, as it is written."""
        return self.agreement.strategy

    @property
    def agreement(self) -> Agreement:
        """How to agree: what costs least time, of what changes the result least."""
        measured, size = self.measured, self.measured.max_workers
        if size < 2:
            return SYNCHRONOUS
        if measured.slowest > UNEVEN * measured.balanced:
            return BALANCED
        share = measured.communication_share(size)
        if share < LITTLE:
            return SYNCHRONOUS
        if share < MUCH and self._by_bytes:
            return HALVED
        return local(self._local_steps)

    @property
    def _local_steps(self) -> int:
        """Steps between synchronizations so that communication costs little: a power of two.

        Workers meet once an epoch at least.
        """
        measured, size = self.measured, self.measured.max_workers
        ratio = measured.communication(size) / max(measured.step(size), 1e-9)
        wanted = math.ceil(math.log2(max(2.0, ratio / ENOUGH)))
        at_most = math.floor(math.log2(max(2, measured.steps_per_epoch(size))))
        return int(2 ** min(wanted, at_most))

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
            f"{self.epochs} epochs {_time(self._takes(1))}.",
            f"Loading the rows onto the workers took {_time(measured.hand_over)} "
            f"({measured.rows / max(measured.hand_over, 1e-9):,.0f} rows/s): a one-time cost "
            "under any strategy.",
        ]
        if size < 2:
            return [*sentences, "The cluster has only one free slot, so it can't be distributed."]
        sentences.append(
            f"With {size} workers a step takes {_time(measured.step(size))}, and an allreduce of "
            f"the {measured.model_bytes / 1e6:,.3g} MB of gradients ({measured.topology}) "
            f"{_time(measured.communication(size))}: with {SYNCHRONOUS.strategy} "
            f"{measured.communication_share(size):.0%} of the time goes to communication, and an "
            f"epoch is {measured.speedup(size):.2g} times as fast as on one worker."
        )
        if self.agreement.balances:
            sentences.append(
                "The slowest worker takes "
                f"{measured.slowest / min(measured.concurrent_steps):.1f} times as long for a step "
                "as the fastest: the others wait for it in every step, unless rows move to them."
            )
        sentences.append(self._verdict())
        if self.workers > 1:
            sentences.append(f"Strategy: dml.{self.strategy}.")
        return sentences

    def _takes(self, workers: int, agreement: Agreement = SYNCHRONOUS) -> float:
        return self.epochs * self.measured.epoch(workers, agreement)

    def _verdict(self) -> str:
        measured, agreement, workers = self.measured, self.agreement, self.workers
        if workers == 1:
            why = "communication would cancel the gain"
            if min(measured.concurrent_steps) > 1.5 * measured.step_alone:
                why = "workers on the same host compete for its cores"
            elif measured.steps_per_epoch(1) == 1:
                why = "an epoch is a single step"
            return f"You don't need to distribute this: more workers would not help, as {why}."
        if not self.is_needed:
            return (
                f"You don't need to distribute this: one worker takes {_time(self._takes(1))} "
                f"({workers} workers would take {_time(self._takes(workers, agreement))})."
            )
        said = (
            f"Distribution helps: numWorkers={workers} with {agreement.strategy} reduces "
            f"{self.epochs} epochs to {_time(self._takes(workers, agreement))}."
        )
        if agreement is not SYNCHRONOUS:
            said += f" With {SYNCHRONOUS.strategy} they would take {_time(self._takes(workers))}."
        if agreement.steps > 1:
            said += " Synchronizing less often may change the result; check with dml.compare."
        return said

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
