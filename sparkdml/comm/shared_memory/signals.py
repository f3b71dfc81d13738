"""Signals between ranks that data in their shared memory is ready.

They are POSIX semaphores in the memory itself. A post releases and a wait acquires, so data written
before the post is visible after the wait on every processor (plain flags would suffice only on
x86), and a rank that waits long sleeps in the kernel.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from sparkdml.errors import CommunicationError
from sparkdml.network.timeouts import COLLECTIVE_SECONDS, SHARED_MEMORY_LOOK_SECONDS

# A semaphore has at most 32 bytes; each gets a cache line of its own, and the adjacent line, which
# processors prefetch.
SEMAPHORE_BYTES = 128

# Spinning notices a post soonest, but on a busy host the peer may need this core: so try a few
# times, then yield between tries, then sleep.
TRIES = 20
YIELD_SECONDS = 1e-3


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """libc's functions, which release the GIL, so that the feed's thread runs during a wait."""

    def __init__(self) -> None:
        """Raises AttributeError if libc lacks them."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.post = libc.sem_post
        self.try_wait = libc.sem_trywait
        self.sched_yield = libc.sched_yield
        self._init = libc.sem_init
        self._wait = libc.sem_timedwait
        pointer = ctypes.c_void_p
        self.post.argtypes = self.try_wait.argtypes = (pointer,)
        self._init.argtypes = (pointer, ctypes.c_int, ctypes.c_uint)
        self._wait.argtypes = (pointer, ctypes.POINTER(_Timespec))

    def initialise(self, address: int) -> None:
        between_processes, count = 1, 0
        if self._init(address, between_processes, count) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")

    def sleep(self, address: int, seconds: float) -> bool:
        """Wait for a post; return False on a time-out, or earlier on a Unix signal."""
        nanoseconds = time.time_ns() + int(seconds * 1e9)
        until = _Timespec(*divmod(nanoseconds, 1_000_000_000))
        posted: int = self._wait(address, ctypes.byref(until))
        return posted == 0


class Signals:
    """One semaphore per pair of ranks and direction, in rank order at `address`."""

    def __init__(
        self,
        address: int,
        rank: int,
        size: int,
        has_left: Callable[[int], bool],
        check: Callable[[], None],
    ) -> None:
        def semaphore(source: int, to: int) -> int:
            return address + SEMAPHORE_BYTES * (source * size + to)

        others = [other for other in range(size) if other != rank]
        self._libc = Semaphores()
        self._to = [semaphore(rank, other) for other in others]
        self._from = [(other, semaphore(other, rank)) for other in others]
        self._has_left, self._check = has_left, check

    @staticmethod
    def num_bytes(size: int) -> int:
        return SEMAPHORE_BYTES * size * size

    @staticmethod
    def initialise(address: int, size: int) -> None:
        libc = Semaphores()
        for index in range(size * size):
            libc.initialise(address + SEMAPHORE_BYTES * index)

    def barrier(self) -> None:
        """Signal all ranks, and wait until all have signalled."""
        self.post()
        self.wait_for_all()

    def post(self) -> None:
        post = self._libc.post
        for semaphore in self._to:
            post(semaphore)

    def wait_for_all(self) -> None:
        """Wait until every rank has posted as often as this rank has waited, including now."""
        try_wait = self._libc.try_wait
        for other, semaphore in self._from:
            for _ in range(TRIES):
                if try_wait(semaphore) == 0:
                    break
            else:
                self._wait(other, semaphore)

    def _wait(self, other: int, semaphore: int) -> None:
        libc, begun = self._libc, time.monotonic()
        while time.monotonic() - begun < YIELD_SECONDS:
            libc.sched_yield()
            if libc.try_wait(semaphore) == 0:
                return
        while not libc.sleep(semaphore, SHARED_MEMORY_LOOK_SECONDS):
            if self._has_left(other):
                if libc.try_wait(semaphore) == 0:
                    return  # it posted just before it left
                raise CommunicationError(f"a rank is probably gone: rank {other} has left")
            self._check()
            if time.monotonic() - begun > COLLECTIVE_SECONDS:
                raise CommunicationError(
                    f"timed out after {COLLECTIVE_SECONDS:g} s on rank {other}"
                )
