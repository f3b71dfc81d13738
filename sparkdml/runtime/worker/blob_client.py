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
from sparkdml.runtime.protocol.blobs import Pieces, Sent, open_own, open_sent, pack, sent_as, total


def fetch(value: Any, place: RelayPlace | None, directory: str) -> Any:
    """What the driver shipped, with its buffers, if they went another way.

    The first worker of an executor downloads the file; the others wait, and map it. Where local
    directories are shared with other users, the file that is there may be anyone's, so each worker
    checks its hash.
    """
    if not isinstance(value, Sent):
        return value
    assert place is not None, "blobs are shipped only where there is a blob server"
    path = Path(directory, f"sparkdml-{value.name}")
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            _download(RelayStore(place), value, path)
    try:
        return open_sent(value, path)
    except OSError:  # another's file, or damaged: replace it
        with _locked(path.with_suffix(".lock")):
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
            pieces = Pieces(pickled.buffers)
            RelayStore(place).write(name, pieces)
            result = sent_as(name, pickled, pieces.sha256)
        elif not pickled.buffers:
            return pickled.pickled
    payload: bytes = cloudpickle.dumps(result)  # type: ignore[no-untyped-call]
    return payload


def _download(store: RelayStore, sent: Sent, path: Path) -> None:
    """Under a name of its own, and renamed when it is whole: others never see a part of it."""
    partial = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        with open(open_own(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            for piece in store.read_pieces(sent.name):
                file.write(piece)
            found = file.tell()
        if found != total(sent.sizes):
            raise OSError(f"the driver sent {found:,} bytes of {total(sent.sizes):,}")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    with open(open_own(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
