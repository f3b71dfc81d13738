"""Memory that processes of one host have mapped, and signals between them that data is ready.

A segment is freed when the last process ends. It is an anonymous file (memfd): it has no name,
neither in /dev/shm nor elsewhere, so a killed process leaves nothing behind, and the size of
/dev/shm (64 MB in many containers) does not matter. A peer opens it as `/proc/<pid>/fd/<fd>`, which
the kernel allows only to the same user on the same host. A nonce proves that it is the intended
file, not that of another process with the same PID in another container. The nonce is in the label
that /proc shows, so that other files are never opened: a process's record locks on a file are lost
as soon as it closes any descriptor of that file. And it is in the file, in case the descriptor
changes between reading the label and opening the file.

Signals are POSIX semaphores in the memory itself. A post releases and a wait acquires, so data
written before the post is visible after the wait on every processor (plain flags would suffice only
on x86), and a rank that waits long sleeps in the kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdml.errors import CommunicationError
from sparkdml.network.timeouts import COLLECTIVE_SECONDS, SHARED_MEMORY_LOOK_SECONDS

_NONCE = struct.Struct("q")


@dataclass(frozen=True)
class Offer:
    """Where to find a rank's memory, as numbers that are sent to the other ranks."""

    pid: int
    fd: int
    nonce: int


def _label(nonce: int) -> str:
    return f"sparkdml-{nonce:x}"


class Segment:
    """A file in memory, open in this process; once mapped, the same bytes in every process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None

    @classmethod
    def create(cls) -> tuple[Segment, Offer]:
        """Create a segment; raises OSError, or AttributeError on platforms without memfd."""
        nonce = _NONCE.unpack(secrets.token_bytes(_NONCE.size))[0]
        fd = os.memfd_create(_label(nonce), os.MFD_CLOEXEC)
        os.pwrite(fd, _NONCE.pack(nonce), 0)
        return cls(fd), Offer(os.getpid(), fd, nonce)

    @classmethod
    def open(cls, offer: Offer) -> Segment | None:
        """Open a peer's segment; return None if it is on another host or can't be opened."""
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            # Another process here, or even this one, may have that PID: don't open its file.
            if not os.readlink(path).startswith(f"/memfd:{_label(offer.nonce)} "):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if os.pread(fd, _NONCE.size, 0) != _NONCE.pack(offer.nonce):
            os.close(fd)
            return None
        return cls(fd)

    def allocate(self, num_bytes: int) -> None:
        """Allocate the memory now: an error here is better than a crash at the first use."""
        os.posix_fallocate(self._fd, 0, num_bytes)

    def map(self, num_bytes: int, local_rank: int) -> None:
        """Map the memory and take the lock of `local_rank`, which is freed when the process ends.

        It is a record lock: the kernel frees it with the process, a forked child does not hold it,
        and it has the same meaning in every container.
        """
        self._memory = mmap.mmap(self._fd, num_bytes)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, local_rank)

    def has_left(self, local_rank: int) -> bool:
        """Whether that rank's process has ended or closed the segment, or this process has."""
        if self._fd < 0:
            return True
        try:
            # Shared, so that two simultaneous checks don't take each other for the owner.
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, local_rank)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, local_rank)
        return True

    @property
    def address(self) -> int:
        assert self._memory is not None, "not mapped"
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @property
    def bytes(self) -> Tensor:
        assert self._memory is not None, "not mapped"
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def close(self) -> None:
        """Release the lock. The memory stays mapped, as a thread may still be using it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def unmap(self) -> None:
        """Release the memory, which is unmapped with the last tensor in it."""
        self._memory = None


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
