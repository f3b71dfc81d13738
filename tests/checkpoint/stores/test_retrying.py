"""Trying again: what is tried, how long, and what is said in the end."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sparkdml.checkpoint.stores.base import Buffer
from sparkdml.checkpoint.stores.fsspec_store import FsspecPlace
from sparkdml.checkpoint.stores.local import LocalPlace
from sparkdml.checkpoint.stores.retrying import Retrying, RetryingPlace
from sparkdml.errors import StoreError
from sparkdml.testing.store_contract import OpenStore, StoreContract


class TestRetrying(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return RetryingPlace(LocalPlace(f"file://{tmp_path}/run")).open


class Failing:
    """Fails as often as there are errors left, then works."""

    url = "s3://bucket/run"

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.attempts = 0
        self.written = b""

    def _attempt(self) -> None:
        self.attempts += 1
        if self._errors:
            raise self._errors.pop(0)

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        first, *rest = chunks
        self._attempt()
        self.written = bytes(first) + b"".join(bytes(chunk) for chunk in rest)

    def read(self, name: str) -> bytes:
        self._attempt()
        return b"content"

    def names(self, prefix: str = "") -> list[str]:
        self._attempt()
        return ["a"]

    def remove(self, name: str) -> None:
        self._attempt()


def backend_error(module: str, name: str, **fields: Any) -> Exception:
    kind = type(name, (Exception,), {"__module__": module, **fields})
    error = kind("the server is unwell")
    assert isinstance(error, Exception)
    return error


TRANSIENT = [
    OSError("unknown"),
    ConnectionResetError("reset"),
    TimeoutError("late"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EBUSY, "slow down"),
    backend_error("botocore.exceptions", "EndpointConnectionError"),
    backend_error("aiohttp.client_exceptions", "ServerDisconnectedError"),
    backend_error("gcsfs.retry", "HttpError", code=503),
    backend_error("gcsfs.retry", "HttpError", code=429),
]
PERMANENT = [
    PermissionError("access denied"),
    OSError(errno.EINVAL, "InvalidBucketName"),
    OSError(errno.EROFS, "read-only"),
    NotADirectoryError("a file is in the way"),
    backend_error("botocore.exceptions", "NoCredentialsError"),
    backend_error("gcsfs.retry", "HttpError", code=401),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: type(error).__name__)
def test_passing_trouble_is_sat_out(error: Exception) -> None:
    waits: list[float] = []
    store = Failing(error, error)
    retrying = Retrying(store, sleep=waits.append)
    retrying.write("state", [b"ab", b"c"])
    assert store.written == b"abc"
    assert store.attempts == 3
    assert len(waits) == 2


@pytest.mark.parametrize("error", PERMANENT, ids=lambda error: type(error).__name__)
def test_what_would_fail_again_is_not_tried_again(error: Exception) -> None:
    store = Failing(error)
    with pytest.raises(StoreError, match="in 1 attempt: ") as caught:
        Retrying(store, sleep=pytest.fail).read("state")
    assert caught.value.__cause__ is error
    assert store.attempts == 1


def test_a_missing_object_is_itself_but_a_missing_bucket_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        Retrying(Failing(FileNotFoundError("state")), sleep=pytest.fail).read("state")
    with pytest.raises(StoreError, match="no such bucket"):
        Retrying(Failing(FileNotFoundError("no such bucket")), sleep=pytest.fail).write("a", [b""])


def test_a_bug_is_not_taken_for_trouble() -> None:
    with pytest.raises(ZeroDivisionError):
        Retrying(Failing(ZeroDivisionError()), sleep=pytest.fail).names()


def test_the_waits_grow_to_the_longest_and_are_never_equal() -> None:
    waits: list[float] = []
    store = Failing(*[OSError()] * 9)
    retrying = Retrying(store, 10, first_seconds=1, longest_seconds=20, sleep=waits.append)
    assert retrying.names() == ["a"]
    limits = [1, 2, 4, 8, 16, 20, 20, 20, 20]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
    assert len(set(waits)) == len(waits)


def test_giving_up_says_where_what_how_often_and_why() -> None:
    store = Failing(*[ConnectionRefusedError("no listener\nsecond line")] * 9)
    with pytest.raises(StoreError) as caught:
        Retrying(store, attempts=3, sleep=lambda seconds: None).write("a/state", [b"x"])
    message = str(caught.value)
    assert "could not write a/state of s3://bucket/run in 3 attempts" in message
    assert "ConnectionRefusedError: no listener." in message
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert store.attempts == 3


def test_chunks_that_can_be_had_only_once_are_refused() -> None:
    store = Failing()
    with pytest.raises(TypeError, match="more than once"):
        Retrying(store).write("state", (b"x" for _ in range(3)))
    assert store.attempts == 0


def test_a_server_that_is_down_for_a_while(own_s3: Any) -> None:
    bucket = own_s3.make_bucket()
    options = {**own_s3.options, "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    raw = FsspecPlace(f"s3://{bucket}/run", options).open()
    raw.write("state", [b"before"])
    own_s3.stop()
    waits: list[float] = []
    with pytest.raises(StoreError, match=r"could not read state of s3://.* in 2 attempts: "):
        Retrying(raw, attempts=2, sleep=waits.append).read("state")
    assert len(waits) == 1

    def come_back(seconds: float) -> None:
        waits.append(seconds)
        own_s3.start()
        own_s3.client().mkdir(bucket)  # moto's server forgets when it is stopped

    store = Retrying(raw, sleep=come_back)
    store.write("state", [b"after"])
    assert len(waits) == 2, "it failed once more, and not again"
    assert store.read("state") == b"after"
    assert store.names() == ["state"]


def test_a_missing_bucket_is_said_at_once(s3: Any) -> None:
    missing = FsspecPlace("s3://no-such-bucket-here/run", s3.options).open()
    with pytest.raises(StoreError, match=r"in 1 attempt: FileNotFoundError: .*bucket"):
        Retrying(missing, sleep=pytest.fail).write("state", [b"x"])
