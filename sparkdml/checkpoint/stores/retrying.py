"""A store that retries another store's operations, since networks fail now and then, for seconds.

Runs in the workers and at the driver, on the threads of its callers.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from sparkdml.checkpoint.stores.base import Buffer, CheckpointStore, Place
from sparkdml.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Packages whose own exceptions are no OSErrors, and mostly mean a network or a server failure.
_BACKENDS = frozenset(
    {
        "adlfs",
        "aiobotocore",
        "aiohttp",
        "asyncio",
        "azure",
        "botocore",
        "concurrent",
        "ftplib",
        "gcsfs",
        "google",
        "http",
        "paramiko",
        "requests",
        "s3fs",
        "urllib3",
    }
)
# Also theirs, but another attempt would fail the same way: settings and credentials.
_MISTAKES = frozenset(
    {
        "ConfigNotFound",
        "DefaultCredentialsError",
        "InvalidEndpointConfigurationError",
        "InvalidRegionError",
        "NoCredentialsError",
        "NoRegionError",
        "ParamValidationError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "UnknownServiceError",
        "AuthenticationException",
        "BadHostKeyException",
        "ClientAuthenticationError",
        "error_perm",
    }
)
_PERMANENT_KINDS = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)
# s3fs raises one of these for a wrong bucket name or argument.
_PERMANENT_NUMBERS = frozenset(
    {errno.EINVAL, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSYS, errno.EMSGSIZE}
)


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT_KINDS) and error.errno not in _PERMANENT_NUMBERS
    kinds = {kind.__name__ for kind in type(error).__mro__}
    backend = type(error).__module__.partition(".")[0]
    return backend in _BACKENDS and not kinds & _MISTAKES and not _is_refusal(error)


class Retrying:
    """The store's interface, with up to `attempts` attempts and growing waits between them.

    `write` may have to start again, so its chunks must be iterable more than once: a sequence, or
    an object whose `__iter__` restarts; never a generator. `read` raises a FileNotFoundError for a
    missing object; every other failure of the store becomes a StoreError.
    """

    def __init__(
        self,
        store: CheckpointStore,
        attempts: int = 5,
        first_seconds: float = 0.2,
        longest_seconds: float = 10.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert attempts >= 1, attempts
        self.url = store.url
        self._store = store
        self._attempts = attempts
        self._first_seconds, self._longest_seconds = first_seconds, longest_seconds
        self._sleep = sleep

    def write(self, name: str, chunks: Iterable[Buffer]) -> None:
        if isinstance(chunks, Iterator):
            raise TypeError(
                f"the chunks of {name} must be iterable more than once, for retries, but got "
                f"a {type(chunks).__name__}. Pass a list, or an object with __iter__"
            )
        self._until_it_works("write", name, lambda: self._store.write(name, chunks))

    def read(self, name: str) -> bytes:
        return self._until_it_works("read", name, lambda: self._store.read(name))

    def names(self, prefix: str = "") -> list[str]:
        return self._until_it_works("list", f"{prefix}*", lambda: self._store.names(prefix))

    def remove(self, name: str) -> None:
        self._until_it_works("remove", name, lambda: self._store.remove(name))

    def _until_it_works(self, verb: str, name: str, operation: Callable[[], T]) -> T:
        for attempt in range(1, self._attempts + 1):
            try:
                return operation()
            except Exception as error:
                if isinstance(error, FileNotFoundError) and verb == "read":
                    raise
                transient = is_transient(error)
                if not transient and not isinstance(error, OSError) and not _of_backend(error):
                    raise  # a bug, here or in the chunks: not the store's failure
                if not transient or attempt == self._attempts:
                    raise self._given_up(verb, name, attempt, error) from error
                seconds = self._wait_seconds(attempt)
                logger.warning(
                    "could not %s %s of %s (%s); trying again in %.1f s",
                    verb, name, self.url, _in_one_line(error), seconds,
                )  # fmt: skip
                self._sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def _wait_seconds(self, attempt: int) -> float:
        longest = min(self._longest_seconds, self._first_seconds * 2.0 ** (attempt - 1))
        return longest * random.uniform(0.5, 1.0)  # or all workers would retry at the same time

    def _given_up(self, verb: str, name: str, attempt: int, error: Exception) -> StoreError:
        tries = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        return StoreError(
            f"could not {verb} {name} of {self.url} in {tries}: {_in_one_line(error)}. "
            "Check that the location exists, that every host can reach it, and the credentials"
        )


@dataclass(frozen=True)
class RetryingPlace:
    """A place whose store retries."""

    place: Place
    attempts: int = 5
    first_seconds: float = 0.2
    longest_seconds: float = 10.0

    @property
    def url(self) -> str:
        return self.place.url

    def open(self) -> Retrying:
        return Retrying(self.place.open(), self.attempts, self.first_seconds, self.longest_seconds)


def _of_backend(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _BACKENDS


def _is_refusal(error: BaseException) -> bool:
    """Whether an HTTP status of gcsfs or Azure is final: 4xx, except time-outs and rate limits."""
    status = getattr(error, "status_code", getattr(error, "code", None))
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)


def _in_one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
