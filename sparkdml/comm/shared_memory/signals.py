"""How ranks tell each other, through shared memory, that something in it is ready.

POSIX semaphores that lie in the memory itself: posting releases and waiting acquires, so that what
was written before is seen after, on every processor (plain flags would do on x86 alone); and a rank
that has waited long sleeps in the kernel until it is posted.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from sparkdml.errors import CommunicationError

# A semaphore has 32 bytes at most; each gets cache lines of its own, with the neighbour that
# processors fetch along with it.
SEMAPHORE_BYTES = 128

# A peer that is about to come is met sooner by one who is awake, but on a busy host it may need
# this very core: so try a few times, then give way between tries, then sleep.
TRIES = 20
YIELD_SECONDS = 1e-3
# How often a sleeper wakes to see whether anybody is still there to wait for.
LOOK_EVERY_SECONDS = 0.2
# As for torch's collectives: a peer that is merely slow must not fail, and one that is gone is
# noticed long before.
TIMEOUT_SECONDS = 1800.0


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphores:
    """libc's functions. They let other threads run: the feed's, while this one waits for a peer."""

    def __init__(self) -> None:
        """Raises AttributeError where libc has none."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.post = libc.sem_post
        self.try_wait = libc.sem_trywait
        self.give_way = libc.sched_yield
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
        """Whether it was posted; False after that time, or earlier when a signal came."""
        nanoseconds = time.time_ns() + int(seconds * 1e9)
        until = _Timespec(*divmod(nanoseconds, 1_000_000_000))
        posted: int = self._wait(address, ctypes.byref(until))
        return posted == 0


class Signals:
    """One semaphore for each pair of ranks and direction, in rank order at `address`."""

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

    def meet(self) -> None:
        """Tell everybody that this rank has come so far, and wait until everybody has."""
        self.tell()
        self.wait_for_all()

    def tell(self) -> None:
        post = self._libc.post
        for semaphore in self._to:
            post(semaphore)

    def wait_for_all(self) -> None:
        """Until everybody has told as often as this rank has waited, with this time."""
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
            libc.give_way()
            if libc.try_wait(semaphore) == 0:
                return
        while not libc.sleep(semaphore, LOOK_EVERY_SECONDS):
            if self._has_left(other):
                if libc.try_wait(semaphore) == 0:
                    return  # its last deed
                raise CommunicationError(f"a peer is probably gone: rank {other} has left")
            self._check()
            if time.monotonic() - begun > TIMEOUT_SECONDS:
                raise CommunicationError(f"waited {TIMEOUT_SECONDS:g} s for rank {other} in vain")
