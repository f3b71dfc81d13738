"""The interface of compression: a scheme, and what adds up the buckets of a run by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from sparkdml.checkpoint.state import State
from sparkdml.comm.base import Communicator, Work
from sparkdml.training.flat import Bucket, FlatParams


class Reducer(ABC):
    """Adds up the buckets of one run over all ranks."""

    @abstractmethod
    def reduce_async_(self, index: int) -> Work:
        """Begin with a bucket: its gradients as the scheme has it, its stats exactly.

        Every rank begins with the same buckets in the same order, and waits in that order.
        """

    def state(self) -> State:
        """What a checkpoint must hold."""
        return {}

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from a state; what belongs to another number of ranks is not in it.

        Returns what of it was lost: state of other buckets, which a forced resume may bring, is
        left out, and begins anew.
        """
        return []


class Compression(ABC):
    """A scheme as a strategy is given it: a frozen dataclass of its numbers."""

    # Whether it adds up by allreduce alone, so that any topology carries it.
    any_topology: ClassVar[bool]
    # Whether ranks keep what they have not sent, and send it later.
    has_residuals: ClassVar[bool]

    @abstractmethod
    def reducer(
        self, comm: Communicator, params: FlatParams, buckets: Sequence[Bucket]
    ) -> Reducer: ...


class Uncompressed(Reducer):
    """As they are, stats and all, in one message a bucket."""

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._begin = [comm.repeated(bucket.tensor) for bucket in buckets]

    def reduce_async_(self, index: int) -> Work:
        return self._begin[index]()


class Unfinished:
    """Work under way that a function finishes, on the thread that waits for it.

    Only an allreduce is begun in the middle of a backward pass. What needs several messages goes on
    when it is awaited: in backward, other ranks may be waiting for another message of this one.
    """

    def __init__(self, begun: Sequence[Work], finish: Callable[[], None]) -> None:
        self._begun, self._finish = begun, finish

    def wait(self) -> None:
        for work in self._begun:
            work.wait()
        self._finish()


def begin_stats(comm: Communicator, bucket: Bucket) -> list[Work]:
    """Weights, losses and votes travel as they are; only the last bucket has any."""
    return [comm.allreduce_async_(bucket.stats)] if bucket.stats.numel() else []
