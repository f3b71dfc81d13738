"""The driver's end: files that workers fetch and leave, over connections that ask for a token.

Everything goes through files, in pieces of bounded size, so that a model of many gigabytes needs no
more memory here than any other.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sparkdml.checkpoint.stores.base import Buffer
from sparkdml.checkpoint.stores.relay import RelayPlace
from sparkdml.checkpoint.stores.relay_server import RelayServer
from sparkdml.runtime.protocol.blobs import map_buffers, pack, pieces, unpack


@dataclass(frozen=True)
class Sent:
    """The small part of something whose buffers went another way."""

    name: str  # of the file that holds them
    pickled: bytes = field(repr=False)
    sizes: tuple[int, ...]


class BlobServer:
    """Serves one submission. `place` is what its workers must know, `None` to do without."""

    def __init__(self, host: str, threshold_bytes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sparkdml-cargo-"))
        self._threshold_bytes = threshold_bytes
        token = secrets.token_urlsafe(32)
        self._server = RelayServer(_Files(self._folder), host, token)
        self.place = RelayPlace("the driver", host, self._server.port, token)

    def upload(self, value: Any) -> Any:
        """`value` itself, or what is shipped in its place if its buffers are large."""
        pickled = pack(value)
        if pickled.num_bytes <= self._threshold_bytes:
            return value
        name = f"cargo-{secrets.token_hex(8)}"
        with (self._folder / name).open("wb") as file:
            for piece in pieces(pickled.buffers):
                file.write(piece)
        return Sent(name, pickled.pickled, tuple(buffer.nbytes for buffer in pickled.buffers))

    def collect(self, value: Any) -> Any:
        """What a worker returned: itself, or put together with the buffers that it left here."""
        if not isinstance(value, Sent):
            return value
        return open_sent(value, self._folder / value.name)

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def open_sent(sent: Sent, path: Path) -> Any:
    return unpack(sent.pickled, map_buffers(path, sent.sizes))


class _Files:
    """The depot's folder as the relay sees it: workers leave results and fetch cargo."""

    url = "the driver's depot"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        with self._path(name, "result").open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    @contextlib.contextmanager
    def as_local_file(self, name: str) -> Iterator[BinaryIO]:
        with self._path(name, "cargo").open("rb") as file:
            yield file

    def read(self, name: str) -> bytes:
        return self._path(name, "cargo").read_bytes()

    def names(self, prefix: str = "") -> list[str]:
        raise ValueError("the depot has no list of names")

    def remove(self, name: str) -> None:
        raise ValueError("the depot's files go with the run")

    def _path(self, name: str, kind: str) -> Path:
        if not re.fullmatch(rf"{kind}-[0-9a-f]+", name):
            raise ValueError(f"the depot knows no {kind} named {name!r}")
        return self._folder / name
