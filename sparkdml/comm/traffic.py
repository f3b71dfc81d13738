"""Counts the bytes and messages that a rank sends.

Our own protocols count each message when it is sent. The internals of Horovod, gloo and NCCL are
not visible, so their collectives count what the algorithm moves: a ring for reductions and gathers,
a chain for broadcasts. Threads count as if they were processes. `dml.compare` shows these numbers.
"""

from __future__ import annotations

import threading


class Traffic:
    """The sums of one rank; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._messages = 0
        self._taken = (0, 0)

    def sent(self, num_bytes: int, messages: int = 1) -> None:
        """Count bytes and messages that were or are about to be sent."""
        with self._lock:
            self._bytes += num_bytes
            self._messages += messages

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def messages(self) -> int:
        return self._messages

    def take(self) -> tuple[int, int]:
        """Return the bytes and messages since the last call."""
        with self._lock:
            now, before = (self._bytes, self._messages), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]

    def allreduced(self, num_bytes: int, size: int) -> None:
        """Count a ring: a reduce-scatter, then an allgather, of one n-th at a time."""
        self.sent(2 * num_bytes * (size - 1) // size, 2 * (size - 1))

    def broadcasted(self, num_bytes: int, size: int) -> None:
        """Count a chain, where every rank but the last forwards the data: the mean over ranks."""
        self.sent(num_bytes * (size - 1) // size, int(size > 1))

    def gathered(self, own_bytes: int, size: int) -> None:
        """Count a ring, where each piece visits every rank, as if all had this one's length."""
        self.sent(own_bytes * (size - 1), size - 1)

    def scattered(self, num_bytes: int, size: int) -> None:
        """Count one part sent to each other rank."""
        self.sent(num_bytes * (size - 1) // size, size - 1)
