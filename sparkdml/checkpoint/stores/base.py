"""The store's interface: named objects in one place that all hosts of a run can reach."""

from __future__ import annotations

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
