"""The interface of compression: a scheme, and its reducer, which sums the buckets of a run.

Reducers run in a worker: a reduction starts during backward and ends on the thread that awaits it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from sparkdml.checkpoint.state import State
from sparkdml.comm.base import Communicator, Work
from sparkdml.training.flat import Bucket, FlatParams


class Reducer(ABC):
    """Adds up the buckets of one run over all ranks. Each rank has one, made at the run's start."""

    @abstractmethod
    def reduce_async_(self, index: int) -> Work:
        """Begin to sum a bucket over all ranks: its gradients as the scheme has it, stats exactly.

        The sums replace the bucket's content by the time that `wait()` of the result returns. It
        is called in the middle of a backward pass, where only an asynchronous allreduce may begin;
        whatever needs several messages belongs into the `wait`. Every rank begins with the same
        buckets in the same order, and waits in that order.
        """

    def state(self) -> State:
        """What a checkpoint must hold: residuals by rank ("reset"), what all ranks share once."""
        return {}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Resume from the values of a `state()`, of which those of other ranks' number are missing.

        Returns what was lost, by name: entries of other buckets, which a forced resume may bring,
        are left out.
        """
        return []


class Compression(ABC):
    """What a strategy is given as `compression=`: a frozen dataclass of its settings.

    Its repr must tell its settings, as it is part of the run's fingerprint. Two class attributes
    describe the scheme, and every scheme sets them.

    Attributes:
        any_topology: whether it communicates by allreduce alone, so that any topology carries it.
        has_residuals: whether ranks keep what they have not sent, to send it later. Such a scheme
            is refused with precision="fp16", whose loss scale changes under the residuals.
    """

    any_topology: ClassVar[bool]
    has_residuals: ClassVar[bool]

    @abstractmethod
    def reducer(self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]) -> Reducer:
        """What adds up a run's buckets; called on each rank of several, before the first step."""


class Uncompressed(Reducer):
    """Sums buckets uncompressed, including their stats, in one message per bucket."""

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._begin = [comm.repeated(bucket.tensor) for bucket in buckets]

    def reduce_async_(self, index: int) -> Work:
        return self._begin[index]()


class Unfinished:
    """Work under way that a function finishes, on the thread that waits for it.

    Only an allreduce begins in the middle of a backward pass. What needs several messages continues
    in the wait: in backward, other ranks may be waiting for another message of this one.
    """

    def __init__(self, begun: Sequence[Work], finish: Callable[[], None]) -> None:
        self._begun, self._finish = begun, finish

    def wait(self) -> None:
        for work in self._begun:
            work.wait()
        self._finish()


def begin_stats(comm: Communicator, bucket: Bucket) -> list[Work]:
    """Sum a bucket's weights, losses and votes exactly; only the last bucket has any."""
    return [comm.allreduce_async_(bucket.stats)] if bucket.stats.numel() else []
