"""fsspec's stores, on a real S3 server and a real FTP server."""

from __future__ import annotations

import contextlib
import pickle
import socket
import tracemalloc
import uuid
from pathlib import Path
from typing import Any

import pytest

from sparkdml.checkpoint.stores import fsspec_store
from sparkdml.checkpoint.stores.fsspec_store import FsspecPlace
from sparkdml.testing.store_contract import FailingChunks, OpenStore, StoreContract

MEGABYTE = 1 << 20


class TestS3(StoreContract):
    large_bytes = 12 * MEGABYTE

    @pytest.fixture
    def open_store(self, s3: Any, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
        monkeypatch.setattr(fsspec_store, "BLOCK_BYTES", 5 * MEGABYTE)  # the least that S3 takes
        place = FsspecPlace(f"s3://{s3.make_bucket()}/runs/1", s3.options)
        return lambda: pickle.loads(pickle.dumps(place)).open()


class TestFtp(StoreContract):
    @pytest.fixture
    def open_store(self, ftp: Any) -> OpenStore:
        place = FsspecPlace(ftp.url(f"{uuid.uuid4().hex}/runs/1"))
        return place.open


class TestLocalThroughFsspec(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return FsspecPlace(f"file://{tmp_path}/runs/1").open


def test_an_aborted_upload_leaves_neither_object_nor_parts(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_store, "BLOCK_BYTES", 5 * MEGABYTE)
    bucket = s3.make_bucket()
    store = FsspecPlace(f"s3://{bucket}/run", s3.options).open()
    uploads: list[int] = []

    class Failing(FailingChunks):
        def __iter__(self) -> Any:
            with contextlib.suppress(self.Failure):
                yield from super().__iter__()
            uploads.append(len(s3.client().list_multipart_uploads(bucket)))
            raise self.Failure

    with pytest.raises(FailingChunks.Failure):
        store.write("state", Failing(7, bytes(MEGABYTE)))
    assert uploads == [1], "the upload had begun"
    assert s3.client().list_multipart_uploads(bucket) == []
    assert s3.client().find(bucket) == []


def test_a_gigabyte_would_not_be_held(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "BLOCK_BYTES", 5 * MEGABYTE)
    store = FsspecPlace(f"s3://{s3.make_bucket()}/run", s3.options).open()
    store.write("warm-up", [b"x"])
    chunk = memoryview(bytes(60 * MEGABYTE))
    tracemalloc.start()
    store.write("state", [chunk])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * MEGABYTE


def test_what_another_process_does_is_seen_at_once(s3: Any) -> None:
    bucket = s3.make_bucket()
    store = FsspecPlace(f"s3://{bucket}", s3.options).open()
    store.write("state", [b"short"])
    assert store.names() == ["state"]
    s3.client().pipe_file(f"{bucket}/state", b"much longer than before")
    assert store.read("state") == b"much longer than before"
    s3.client().pipe_file(f"{bucket}/folder/other", b"x")
    assert store.names() == ["folder/other", "state"]
    s3.client().rm_file(f"{bucket}/state")
    assert store.names() == ["folder/other"]
    with pytest.raises(FileNotFoundError):
        store.read("state")


def test_a_missing_bucket_is_no_empty_object(s3: Any) -> None:
    store = FsspecPlace("s3://no-such-bucket-here/run", s3.options).open()
    with pytest.raises(FileNotFoundError, match="bucket"):
        store.write("state", [b"x"])


def test_a_lost_connection_is_renewed(ftp: Any) -> None:
    store = FsspecPlace(ftp.url(uuid.uuid4().hex)).open()
    store.write("state", [b"x"])
    assert store._connected is not None
    store._connected[0].ftp.sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises((OSError, EOFError)):
        store.write("state", [b"y"])
    store.write("state", [b"y"])
    assert store.read("state") == b"y"


def test_secrets_are_not_shown() -> None:
    place = FsspecPlace("s3://bucket/run", {"key": "AKIA", "secret": "hush"})
    assert "hush" not in repr(place)
    assert "hush" not in repr(place.open())
