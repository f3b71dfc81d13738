"""A worker's side of blobs: what the driver shipped is downloaded, and large results are uploaded.

Runs in a task's process, on its main thread. Blobs are downloaded once for each executor: workers
of one executor share a file, which is removed at the end of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from sparkdml.checkpoint.stores.relay import RelayPlace, RelayStore
from sparkdml.runtime.protocol.blobs import Sent, map_buffers, open_sent, pack, pieces, total


def fetch(value: Any, place: RelayPlace | None, directory: str) -> Any:
    """What the driver shipped, with its buffers, if they went another way.

    The first worker of an executor downloads the file; the others wait, and map it.
    """
    if not isinstance(value, Sent):
        return value
    assert place is not None, "blobs are shipped only where there is a blob server"
    path = Path(directory, f"sparkdml-{value.name}")
    with _locked(path.with_suffix(".lock")):
        try:
            map_buffers(path, value.sizes)
        except OSError:  # not there, or a fetch was cut off
            _download(RelayStore(place), value, path)
        return open_sent(value, path)


def release(value: Any, directory: str) -> None:
    """Remove the file: what is mapped stays readable."""
    if isinstance(value, Sent):
        for suffix in ("", ".lock"):
            Path(directory, f"sparkdml-{value.name}{suffix}").unlink(missing_ok=True)


def pickle_result(result: Any, place: RelayPlace | None, threshold_bytes: int) -> bytes:
    """The pickle that goes by Spark's channel; large buffers are uploaded before it."""
    if place is not None:
        pickled = pack(result)
        if pickled.num_bytes > threshold_bytes:
            name = f"result-{secrets.token_hex(8)}"
            RelayStore(place).write(name, pieces(pickled.buffers))
            sizes = tuple(buffer.nbytes for buffer in pickled.buffers)
            result = Sent(name, pickled.pickled, sizes)
        elif not pickled.buffers:
            return pickled.pickled
    payload: bytes = cloudpickle.dumps(result)  # type: ignore[no-untyped-call]
    return payload


def _download(store: RelayStore, sent: Sent, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for piece in store.read_pieces(sent.name):
            file.write(piece)
    found = path.stat().st_size
    if found != total(sent.sizes):
        raise OSError(f"the driver sent {found:,} bytes of {total(sent.sizes):,}")


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
