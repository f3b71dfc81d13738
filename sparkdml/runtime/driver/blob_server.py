"""The driver's blob server: files that workers download and upload, with the run's own token.

Runs in the driver's process, on the relay server's threads, as long as a submission, and owns a
temporary folder. Everything goes through files, in pieces of bounded size, so that a model of many
gigabytes needs no more memory here than any other.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sparkdml.checkpoint.stores.base import Buffer
from sparkdml.checkpoint.stores.relay import RelayPlace
from sparkdml.checkpoint.stores.relay_server import RelayServer
from sparkdml.network.timeouts import Timeouts
from sparkdml.runtime.protocol.blobs import Pieces, Sent, open_sent, pack, sent_as


class BlobServer:
    """Serves one submission. `place` is what its workers must know."""

    def __init__(self, host: str, threshold_bytes: int, timeouts: Timeouts | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sparkdml-blobs-"))
        self._threshold_bytes = threshold_bytes
        token = secrets.token_urlsafe(32)
        self._server = RelayServer(_Files(self._folder), host, token, timeouts)
        self.place = RelayPlace(
            "the driver",
            host,
            port=self._server.port,
            token=token,
            timeouts=timeouts or Timeouts(),
        )

    def upload(self, value: Any) -> Any:
        """`value` itself, or what is shipped in its place if its buffers are large."""
        pickled = pack(value)
        if pickled.num_bytes <= self._threshold_bytes:
            return value
        name = f"blob-{secrets.token_hex(8)}"
        pieces = Pieces(pickled.buffers)
        with (self._folder / name).open("wb") as file:
            for piece in pieces:
                file.write(piece)
        return sent_as(name, pickled, pieces.sha256)

    def collect(self, value: Any) -> Any:
        """What a worker returned: itself, or put together with the buffers that it uploaded."""
        if not isinstance(value, Sent):
            return value
        return open_sent(value, self._folder / value.name)

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Files:
    """The folder as the relay sees it: workers write results and read blobs."""

    url = "the driver's blob server"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        with self._path(name, "result").open("wb") as file:
            for chunk in chunks:
                file.write(chunk)

    @contextlib.contextmanager
    def as_local_file(self, name: str) -> Iterator[BinaryIO]:
        with self._path(name, "blob").open("rb") as file:
            yield file

    def read(self, name: str) -> bytes:
        return self._path(name, "blob").read_bytes()

    def names(self, prefix: str = "") -> list[str]:
        raise ValueError("the blob server has no list of names")

    def remove(self, name: str) -> None:
        raise ValueError("the blob server removes its files at the end of the run")

    def _path(self, name: str, kind: str) -> Path:
        if not re.fullmatch(rf"{kind}-[0-9a-f]+", name):
            raise ValueError(f"the blob server has no {kind} named {name!r}")
        return self._folder / name
