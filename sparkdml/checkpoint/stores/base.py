"""The store's interface: named objects in one place that all hosts of a run can reach.

Which names objects may have, and how an unfinished one is called until it is whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Store(Protocol):
    """Four methods; bring your own. A name is a relative path such as `checkpoints/7/state`."""

    @property
    def url(self) -> str:
        """For messages."""
        ...

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        """Make or replace an object. It appears whole or not at all, and is durable on return."""
        ...

    def read(self, name: str) -> bytes:
        """The whole object; FileNotFoundError if there is none."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """The sorted names of all objects that start with `prefix`, whole ones only."""
        ...

    def remove(self, name: str) -> None:
        """Delete an object. That there is none is no error."""
        ...


class Place(Protocol):
    """What is shipped to workers: how to open the store there."""

    @property
    def url(self) -> str: ...

    def open(self) -> Store: ...


_SUFFIX = ".partial"


def check_name(name: str) -> str:
    """The name, if it stays inside the store: names come from manifests and over sockets."""
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
