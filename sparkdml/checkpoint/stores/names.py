"""Which names objects may have, and how an unfinished one is called until it is whole."""

from __future__ import annotations

import uuid

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
