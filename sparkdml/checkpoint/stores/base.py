"""The interface of checkpoint stores; which names objects may have, and which are temporary.

Stores are used at the driver and in the workers, there by the training thread (reading) and the
checkpoint thread (writing).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class CheckpointStore(Protocol):
    """A place of named objects that the driver and all workers of a run can reach.

    Write one for `dml.Checkpoints(store=…)`. It is pickled for the workers, and its methods are
    called by several threads at once. A name is a relative path such as `checkpoints/7/state`.

    An OSError counts as transient, and the operation is retried, up to five attempts in all. A
    PermissionError, a FileNotFoundError and the like are not retried, nor is any other exception.
    """

    @property
    def url(self) -> str:
        """The place, for messages; without credentials."""
        ...

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Make or replace an object. It appears whole or not at all, and is durable on return.

        If iterating over `chunks` raises, the object stays what it was.
        """
        ...

    def read(self, name: str) -> bytes:
        """The whole object; FileNotFoundError if there is none."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """The sorted names of all objects that start with `prefix`, whole ones only."""
        ...

    def remove(self, name: str) -> None:
        """Delete an object. If there is none, nothing happens."""
        ...


class Place(Protocol):
    """What is shipped to workers: how to open the store there."""

    @property
    def url(self) -> str: ...

    def open(self) -> CheckpointStore: ...


_SUFFIX = ".partial"


def check_name(name: str) -> str:
    """The name, if it stays inside the store; else a ValueError.

    Names come from manifests and over sockets: a store checks them before it makes a path of them.
    """
    if any(part in ("", ".", "..") for part in name.split("/")) or not name.isprintable():
        raise ValueError(
            f"an object's name must be a relative path without empty parts, '.' or '..', "
            f"but got {name!r}"
        )
    if is_temporary(name):
        raise ValueError(f"an object's name must not look like a temporary one, but got {name!r}")
    return name


def folder_of_prefix(prefix: str) -> str:
    """The folder below which all names with this prefix are; "" is the store's own."""
    folder = prefix.rpartition("/")[0]
    return check_name(folder) if folder else ""


def temporary_name(name: str) -> str:
    """A name in the same folder that no other writer has, which listings leave out."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}.{uuid.uuid4().hex}{_SUFFIX}"


def is_temporary(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base.startswith(".") and base.endswith(_SUFFIX)


def is_leftover_of(name: str, candidate: str) -> bool:
    """Whether `candidate` is what a killed writer of `name` left behind."""
    folder, slash, base = name.rpartition("/")
    return is_temporary(candidate) and candidate.startswith(f"{folder}{slash}.{base}.")
