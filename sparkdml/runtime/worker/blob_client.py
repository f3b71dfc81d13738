"""A worker's end: what is large is fetched once an executor, and left at the driver's depot."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from sparkdml.checkpoint.stores.relay import RelayPlace, RelayStore
from sparkdml.runtime.driver.blob_server import Sent, open_sent
from sparkdml.runtime.protocol.blobs import map_buffers, pack, pieces, total


def fetch(value: Any, place: RelayPlace | None, directory: str) -> Any:
    """What the driver shipped, with its buffers, if they came another way.

    Workers of one executor share a file: the first fetches it, the others wait and map it.
    """
    if not isinstance(value, Sent):
        return value
    assert place is not None, "nothing is consigned without a depot"
    path = Path(directory, f"sparkdml-{value.name}")
    with _locked(path.with_suffix(".lock")):
        try:
            map_buffers(path, value.sizes)
        except OSError:  # not there, or a fetch was cut off
            _download(RelayStore(place), value, path)
        return open_sent(value, path)


def release(value: Any, directory: str) -> None:
    """The run is over: what is mapped stays readable, and the disk has its room again."""
    if isinstance(value, Sent):
        for suffix in ("", ".lock"):
            Path(directory, f"sparkdml-{value.name}{suffix}").unlink(missing_ok=True)


def pickle_result(result: Any, place: RelayPlace | None, threshold_bytes: int) -> bytes:
    """The pickle that goes by Spark's channel; large buffers go to the driver's depot before it."""
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
