"""Memory that several processes of one host have mapped, and that is freed when the last one ends.

It is an anonymous file (memfd): it has no name, neither in /dev/shm nor elsewhere, so a killed
process leaves nothing behind, and the size of /dev/shm (64 MB in many containers) does not matter.
A peer opens it as `/proc/<pid>/fd/<fd>`, which the kernel allows only to the same user on the same
host. A nonce proves that it is the intended file, not that of another process with the same PID in
another container. The nonce is in the label that /proc shows, so that other files are never opened:
a process's record locks on a file are lost as soon as it closes any descriptor of that file. And it
is in the file, in case the descriptor changes between reading the label and opening the file.
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
