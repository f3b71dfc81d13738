"""What a rank sends: bytes and messages, counted where they leave it.

A wire that is ours counts each message as it is sent. The collectives of Horovod, gloo and NCCL
can't be looked into, so those count what their algorithm moves: a ring for reductions and gathers,
a chain for broadcasts. Threads count as if they were processes. The tables and pictures of
`dml.compare` come from these numbers.
"""

from __future__ import annotations

import threading


class Traffic:
    """Sums of one rank; may be added to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._messages = 0
        self._taken = (0, 0)

    def sent(self, num_bytes: int, messages: int = 1) -> None:
        """So much has left, or is about to."""
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
        """Bytes and messages since the last call."""
        with self._lock:
            now, before = (self._bytes, self._messages), self._taken
            self._taken = now
        return now[0] - before[0], now[1] - before[1]

    def allreduced(self, num_bytes: int, size: int) -> None:
        """A ring: a reduce-scatter, then an allgather, of one n-th at a time."""
        self.sent(2 * num_bytes * (size - 1) // size, 2 * (size - 1))

    def broadcasted(self, num_bytes: int, size: int) -> None:
        """A chain: every rank but the last passes it on; the mean over the ranks."""
        self.sent(num_bytes * (size - 1) // size, int(size > 1))

    def gathered(self, own_bytes: int, size: int) -> None:
        """A ring: each piece visits every rank; as if all were as long as this one."""
        self.sent(own_bytes * (size - 1), size - 1)

    def scattered(self, num_bytes: int, size: int) -> None:
        """Each rank sends every other one its part."""
        self.sent(num_bytes * (size - 1) // size, size - 1)
