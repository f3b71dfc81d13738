"""Collectives through the driver, for a few small messages among tasks that Spark may restart.

Each rank sends its contribution to the driver and polls until all ranks' contributions are there.
Contributions are recorded (idempotent): a restarted task repeats its calls and receives the
recorded results, so that the other ranks wait for it and no contribution counts twice. Calls are
numbered within a phase, such as the end of an epoch; a restarted task resumes at the phase in which
it was lost. `DriverExchange` lives in the driver and is called from the control server's threads;
`DriverCommunicator` runs in each worker and asks it over the control connection.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparkdml.comm.base import ReduceOp, Work, reduce_in_rank_order
from sparkdml.comm.composed import ComposedCommunicator, Done
from sparkdml.errors import CommunicationError
from sparkdml.network.timeouts import DRIVER_EXCHANGE_SECONDS

# The limit for all ranks' content in one answer: a line of the control connection has a maximum
# length, and base64 makes the content a third longer, plus some bytes per rank.
MAX_CONTENT_BYTES = 512 << 10
POLL_SECONDS = 0.005
MAX_POLL_SECONDS = 0.1

FIRST_PHASE = "first"

# Returns the content of all ranks in rank order, or None while some are missing. Its fields are
# those of `DriverExchange.contribute`.
Ask = Callable[..., list[str] | None]


class DriverExchange:
    """The recorded contributions, in the driver. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: dict[tuple[str, str, int], dict[int, str]] = {}

    def contribute(
        self, phase: str, number: int, rank: int, content: str, group: str = "", size: int = 1
    ) -> list[str] | None:
        key = (phase, group, number)
        with self._lock:
            if key not in self._contents:
                self._forget(phase)
            recorded = self._contents.setdefault(key, {})
            recorded.setdefault(rank, content)
            return [recorded[r] for r in range(size)] if len(recorded) == size else None

    def _forget(self, phase: str) -> None:
        """Keep the first phase and the last three, which a restarted task may still repeat.

        No phase ends without all ranks, so a restarted task begins at most two phases back: it may
        have been lost before it could report that a phase had begun, while the others moved on to
        the next. Every task repeats the first phase, in which it describes its rows.
        """
        phases = list(dict.fromkeys(key[0] for key in self._contents))
        kept = {phase, FIRST_PHASE, *phases[-3:]}
        self._contents = {key: found for key, found in self._contents.items() if key[0] in kept}


class DriverCommunicator(ComposedCommunicator):
    """All ranks of a role. It reduces in rank order and waits `wait_seconds` for other ranks."""

    native_dtypes = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})

    def __init__(
        self,
        rank: int,
        size: int,
        ask: Ask,
        wait_seconds: float = DRIVER_EXCHANGE_SECONDS,
        group: str = "",
    ) -> None:
        self.rank, self.size = rank, size
        self._ask, self._wait_seconds, self._group = ask, wait_seconds, group
        self._phase, self._number = FIRST_PHASE, 0

    def begin(self, phase: str) -> None:
        """Begin a phase, in which calls are numbered from 1; every rank calls it at that point."""
        self._phase, self._number = phase, 0

    def exchange(self, own: bytes) -> list[bytes]:
        """Return all ranks' bytes, in rank order."""
        length = max(1, MAX_CONTENT_BYTES // self.size)  # of a piece; the same on every rank
        pieces = range(0, max(1, len(own)), length)
        count = max(map(int, self._gather(str(len(pieces))))) if self.size > 1 else len(pieces)
        received = [bytearray() for _ in range(self.size)]
        for index in range(count):
            piece = own[index * length : (index + 1) * length]
            for rank, content in enumerate(self._gather(base64.b64encode(piece).decode())):
                received[rank] += base64.b64decode(content)
        return [bytes(content) for content in received]

    def _gather(self, content: str) -> list[str]:
        self._number += 1
        deadline, pause = time.monotonic() + self._wait_seconds, POLL_SECONDS
        while True:
            found = self._ask(
                phase=self._phase,
                number=self._number,
                rank=self.rank,
                content=content,
                group=self._group,
                size=self.size,
            )
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"not all {self.size} ranks reached collective {self._number} of phase "
                    f"{self._phase!r} within {self._wait_seconds:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    # -- the primitives of ComposedCommunicator ---------------------------------------------------

    def _start_allreduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        received = [_tensor(part, tensor) for part in self.exchange(_bytes(tensor))]
        tensor.detach().copy_(reduce_in_rank_order(received, op))
        return Done()

    def _broadcast_words(self, words: Tensor, root: int) -> None:
        received = self.exchange(_bytes(words) if self.rank == root else b"")
        words.detach().copy_(_tensor(received[root], words))

    def _allgather_words(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        return _tensor(b"".join(self.exchange(_bytes(words))), words, flat=True)

    def _exchange_words(
        self, words: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        starts = [sum(send_counts[:rank]) for rank in range(self.size)]
        sizes = _bytes(torch.tensor([starts, list(send_counts)], dtype=torch.int64))
        tables = [
            torch.frombuffer(bytearray(part), dtype=torch.int64).view(2, self.size)
            for part in self.exchange(sizes)
        ]
        item = words.element_size()
        received = b""
        for table, content in zip(tables, self.exchange(_bytes(words)), strict=True):
            start, count = int(table[0, self.rank]), int(table[1, self.rank])
            received += content[start * item : (start + count) * item]
        return _tensor(received, words, flat=True)

    def _open_split(self, ranks: Sequence[int], color: int) -> DriverCommunicator:
        group = DriverCommunicator(
            ranks.index(self.rank),
            len(ranks),
            ask=self._ask,
            wait_seconds=self._wait_seconds,
            group=f"{self._group}/{self._number}.{color}",
        )
        group.begin(self._phase)
        return group

    def barrier(self) -> None:
        self._gather("")

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


def _tensor(content: bytes, like: Tensor, flat: bool = False) -> Tensor:
    if not content:
        return like.new_empty(0)
    found = torch.frombuffer(bytearray(content), dtype=like.dtype).to(like.device)
    return found if flat else found.view(like.shape)
