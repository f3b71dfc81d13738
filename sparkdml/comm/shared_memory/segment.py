"""Memory that several processes of one host have mapped, and that is gone when the last one is.

It is an anonymous file (memfd): it has no name, neither in /dev/shm nor elsewhere, so that a
process that is killed leaves nothing behind, and the size of /dev/shm (64 MB in many containers)
does not matter. A peer opens it as `/proc/<pid>/fd/<fd>`, which the kernel allows to the same user
on the same host only. A nonce proves that it is the one that was meant, and not that of another
process which has the same number in another container. It is part of the label that those see who
look into /proc, so that what is not meant is never opened: record locks, our seats, are lost as
soon as the process closes any descriptor of their file. And it is in the file, for what may happen
between a look and the opening.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

_NONCE = struct.Struct("q")


@dataclass(frozen=True)
class Offer:
    """Where a rank's memory is to be found, as numbers that travel to the other ranks."""

    pid: int
    fd: int
    nonce: int


def _label(nonce: int) -> str:
    return f"sparkdml-{nonce:x}"


class Segment:
    """A file in memory, open in this process; once mapped, one slice of bytes for everybody."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory: mmap.mmap | None = None

    @classmethod
    def create(cls) -> tuple[Segment, Offer]:
        """Raises OSError, or AttributeError where the platform has no such files."""
        nonce = _NONCE.unpack(secrets.token_bytes(_NONCE.size))[0]
        fd = os.memfd_create(_label(nonce), os.MFD_CLOEXEC)
        os.pwrite(fd, _NONCE.pack(nonce), 0)
        return cls(fd), Offer(os.getpid(), fd, nonce)

    @classmethod
    def open(cls, offer: Offer) -> Segment | None:
        """What a peer offers, or None where it is on another host or can't be opened."""
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            # Another process may have that number here, or even this one: none of it is opened.
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
        """Take the memory now: an error here is better than a crash at the first use."""
        os.posix_fallocate(self._fd, 0, num_bytes)

    def map(self, num_bytes: int, seat: int) -> None:
        """Map it, and sit down: a seat is left when its process ends, in whatever way.

        Seats are record locks: the kernel frees them with the process, a child that it has forked
        does not hold them, and they mean the same in every container.
        """
        self._memory = mmap.mmap(self._fd, num_bytes)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, seat)

    def has_left(self, seat: int) -> bool:
        """Whether the process that sat there has ended or closed the segment; or this one has."""
        if self._fd < 0:
            return True
        try:
            # Shared, so that two that look at the same time don't take each other for the owner.
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, seat)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, seat)
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
        """Leave the seat. What is mapped stays: a thread may still be at work in it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def unmap(self) -> None:
        """Let go of the memory, which goes with the last tensor in it."""
        self._memory = None
