"""Blobs: objects taken apart into a small pickle and their large buffers, and files of those.

Pure functions, used by the driver and by workers. The pickle goes by Spark's own channels, as all
code must. The buffers are plain bytes, of which nothing is ever unpickled, so they may go another
way: one after another in a file, which the other side maps. The file's hash goes with the pickle,
and is checked before anything is used. Tensors that share memory still do when they are put
together again.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import pickle
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyspark.cloudpickle import CloudPickler
from torch.storage import TypedStorage, UntypedStorage

ALIGNMENT = 64  # of each buffer, for the vector units that will read it
PIECE_BYTES = 4 << 20


class Pieces:
    """The file's content, without a copy of anything; its hash is known once it has been read."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.sha256 = ""

    def __iter__(self) -> Iterator[memoryview]:
        digest = hashlib.sha256()
        for piece in self._cut():
            digest.update(piece)
            yield piece
        self.sha256 = digest.hexdigest()

    def _cut(self) -> Iterator[memoryview]:
        for buffer in self._buffers:
            for start in range(0, buffer.nbytes, PIECE_BYTES):
                yield buffer[start : start + PIECE_BYTES]
            yield memoryview(bytes(_padding(buffer.nbytes)))


def total(sizes: Sequence[int]) -> int:
    return sum(size + _padding(size) for size in sizes)


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file of this user's; an OSError for a link, and for another user's."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user's")
    return descriptor


def map_buffers(path: Path, sizes: Sequence[int], sha256: str) -> list[memoryview]:
    """Map the file, if it is the one that was sent; an OSError if not.

    Writing to the pages changes neither file nor other readers. The file may be removed at once:
    the mapping outlives its name.
    """
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != total(sizes):
            raise OSError(f"{path} has {found:,} bytes, not {total(sizes):,}")
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    if hashlib.sha256(whole).hexdigest() != sha256:
        raise OSError(f"{path} is not what was sent: its SHA-256 differs")
    buffers, start = [], 0
    for size in sizes:
        buffers.append(whole[start : start + size])
        start += size + _padding(size)
    return buffers


def _padding(size: int) -> int:
    return -size % ALIGNMENT


LEAST_BYTES = 1 << 20  # smaller buffers stay inside of the pickle


@dataclass(frozen=True)
class Pickled:
    """What `pack` makes; the buffers are those of the object itself, not copies."""

    pickled: bytes
    buffers: list[memoryview]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def pack(value: Any) -> Pickled:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)  # type: ignore[no-untyped-call]
    return Pickled(file.getvalue(), packer.buffers)


def unpack(pickled: bytes, buffers: Sequence[memoryview]) -> Any:
    """`pickled` must have come by a trusted channel. Tensors become views of the buffers."""
    return _Unpacker(pickled, buffers).load()


class _Packer(CloudPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]
        self.buffers: list[memoryview] = []
        self._storages: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        kind = type(value)
        if kind is bytes:
            return ("bytes", self._add(value)) if len(value) >= LEAST_BYTES else None
        if kind is np.ndarray:
            if value.nbytes < LEAST_BYTES or value.dtype.hasobject or not value.flags.c_contiguous:
                return None
            flat = value.reshape(-1).view(np.uint8)
            return "array", self._add(flat), value.dtype.str, value.shape
        if kind is TypedStorage:
            found = self._add_storage(value._untyped_storage)
            return None if found is None else ("storage", found, value.dtype)
        if kind is UntypedStorage:
            found = self._add_storage(value)
            return None if found is None else ("untyped", found)
        return None

    def _add(self, buffer: Any) -> int:
        self.buffers.append(memoryview(buffer).cast("B"))
        return len(self.buffers) - 1

    def _add_storage(self, storage: UntypedStorage) -> int | None:
        if storage.device.type != "cpu" or storage.nbytes() < LEAST_BYTES:
            return None
        key = storage._cdata
        if key not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[key] = self._add(whole.numpy())
        return self._storages[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, pickled: bytes, buffers: Sequence[memoryview]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._buffers = buffers
        self._storages: dict[int, UntypedStorage] = {}

    def persistent_load(self, key: tuple[Any, ...]) -> Any:
        kind, index, *details = key
        buffer = self._buffers[index]
        if kind == "bytes":
            return buffer.tobytes()
        if kind == "array":
            dtype, shape = details
            return np.frombuffer(buffer, dtype=dtype).reshape(shape)
        if index not in self._storages:
            self._storages[index] = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        storage = self._storages[index]
        if kind == "untyped":
            return storage
        typed: Any = TypedStorage
        return typed(wrap_storage=storage, dtype=details[0], _internal=True)


@dataclass(frozen=True)
class Sent:
    """What is shipped in place of an object whose buffers went another way."""

    name: str  # of the file that holds them
    pickled: bytes = field(repr=False)
    sizes: tuple[int, ...]
    sha256: str  # of the file


def sent_as(name: str, pickled: Pickled, sha256: str) -> Sent:
    sizes = tuple(buffer.nbytes for buffer in pickled.buffers)
    return Sent(name, pickled.pickled, sizes, sha256)


def open_sent(sent: Sent, path: Path) -> Any:
    return unpack(sent.pickled, map_buffers(path, sent.sizes, sent.sha256))
