"""A store that tries again: networks and object stores fail now and then, for seconds."""

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

# The packages whose own exceptions, no OSErrors, mostly tell of a network or a server.
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
# Theirs too, but another try would meet them again: settings and credentials.
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
# Among them, how s3fs says that a bucket's name or an argument is wrong.
_PERMANENT_NUMBERS = frozenset(
    {errno.EINVAL, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSYS, errno.EMSGSIZE}
)


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT_KINDS) and error.errno not in _PERMANENT_NUMBERS
    kinds = {kind.__name__ for kind in type(error).__mro__}
    backend = type(error).__module__.partition(".")[0]
    return backend in _BACKENDS and not kinds & _MISTAKES and not _is_refusal(error)


class Retrying:
    """The store's interface, with up to `attempts` tries and longer and longer waits between.

    `write` may have to start again, so its chunks must be iterable more than once: a sequence, or
    an object whose `__iter__` restarts; never a generator. A missing object is a
    FileNotFoundError, of `read` only; all else that the store can't do becomes a StoreError.
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
                f"the chunks of {name} must be iterable more than once, for another try, but got "
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
                    raise  # a bug, here or in the chunks: none of the store's troubles
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
        return longest * random.uniform(0.5, 1.0)  # or all workers would come back at once

    def _given_up(self, verb: str, name: str, attempt: int, error: Exception) -> StoreError:
        tries = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        return StoreError(
            f"could not {verb} {name} of {self.url} in {tries}: {_in_one_line(error)}. "
            "Check that the place exists, that every host can reach it, and the credentials"
        )


@dataclass(frozen=True)
class RetryingPlace:
    """A place whose store tries again."""

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
    """gcsfs and Azure carry an HTTP status: 4xx is the caller's fault, but for time and rate."""
    status = getattr(error, "status_code", getattr(error, "code", None))
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)


def _in_one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
