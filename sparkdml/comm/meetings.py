"""A communicator by way of the driver, for few and small messages among tasks that may come back.

Whoever comes to a meeting leaves his words at the driver's table and asks until everybody's are
there. Words that were left once stay: a task that Spark starts again goes to the same meetings
once more, hears the same, and changes nothing. So others wait for who is on his way, and nobody is
ever counted twice. Meetings are numbered within a chapter, such as the end of an epoch: a task
that comes back begins with the chapter in which it was lost.
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

# Of all ranks together, in one answer: a line of the control wire has a largest length, and words
# become a third longer on it, and some bytes a rank.
MAX_WORDS_BYTES = 512 << 10
POLL_SECONDS = 0.005
MAX_POLL_SECONDS = 0.1

FIRST_CHAPTER = "first"

# The words that everybody left at a meeting, in rank order, or None if some are missing. The
# fields are those of `Meetings.come`.
Ask = Callable[..., list[str] | None]


class Meetings:
    """The table at the driver. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._words: dict[tuple[str, str, int], dict[int, str]] = {}

    def come(
        self, chapter: str, number: int, rank: int, words: str, group: str = "", size: int = 1
    ) -> list[str] | None:
        key = (chapter, group, number)
        with self._lock:
            if key not in self._words:
                self._forget(chapter)
            here = self._words.setdefault(key, {})
            here.setdefault(rank, words)
            return [here[r] for r in range(size)] if len(here) == size else None

    def _forget(self, chapter: str) -> None:
        """Nobody who comes back begins before the last chapter but two: none may end without him.

        He may be lost in a chapter before he could say that it has begun, while the others go on to
        the next. But for the first, in which everybody looks at his rows.
        """
        chapters = list(dict.fromkeys(key[0] for key in self._words))
        kept = {chapter, FIRST_CHAPTER, *chapters[-3:]}
        self._words = {key: words for key, words in self._words.items() if key[0] in kept}


class MeetingCommunicator(ComposedCommunicator):
    """All ranks of a role. Reductions add in rank order. `wait_seconds` is for a lost peer."""

    native_dtypes = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})

    def __init__(
        self, rank: int, size: int, ask: Ask, wait_seconds: float = 600.0, group: str = ""
    ) -> None:
        self.rank, self.size = rank, size
        self._ask, self._wait_seconds, self._group = ask, wait_seconds, group
        self._chapter, self._number = FIRST_CHAPTER, 0

    def begin(self, chapter: str) -> None:
        """From here on meetings are counted anew; every rank says so at the same place."""
        self._chapter, self._number = chapter, 0

    def exchange(self, own: bytes) -> list[bytes]:
        """Everybody's bytes, in rank order."""
        length = max(1, MAX_WORDS_BYTES // self.size)  # of a piece; the same on every rank
        pieces = range(0, max(1, len(own)), length)
        count = max(map(int, self._meet(str(len(pieces))))) if self.size > 1 else len(pieces)
        received = [bytearray() for _ in range(self.size)]
        for index in range(count):
            piece = own[index * length : (index + 1) * length]
            for rank, words in enumerate(self._meet(base64.b64encode(piece).decode())):
                received[rank] += base64.b64decode(words)
        return [bytes(content) for content in received]

    def _meet(self, words: str) -> list[str]:
        self._number += 1
        deadline, pause = time.monotonic() + self._wait_seconds, POLL_SECONDS
        while True:
            found = self._ask(
                chapter=self._chapter,
                number=self._number,
                rank=self.rank,
                words=words,
                group=self._group,
                size=self.size,
            )
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"not all of {self.size} ranks have come to meeting {self._number} of "
                    f"{self._chapter!r} within {self._wait_seconds:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)

    # -- what ComposedCommunicator asks for -------------------------------------------------------

    def _start_allreduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        everybody = [_tensor(part, tensor) for part in self.exchange(_bytes(tensor))]
        tensor.detach().copy_(reduce_in_rank_order(everybody, op))
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

    def _open_split(self, ranks: Sequence[int], color: int) -> MeetingCommunicator:
        group = MeetingCommunicator(
            ranks.index(self.rank),
            len(ranks),
            ask=self._ask,
            wait_seconds=self._wait_seconds,
            group=f"{self._group}/{self._number}.{color}",
        )
        group.begin(self._chapter)
        return group

    def barrier(self) -> None:
        self._meet("")

    def close(self) -> None:
        """Nothing is open."""


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().numpy().tobytes()


def _tensor(content: bytes, like: Tensor, flat: bool = False) -> Tensor:
    if not content:
        return like.new_empty(0)
    found = torch.frombuffer(bytearray(content), dtype=like.dtype).to(like.device)
    return found if flat else found.view(like.shape)
