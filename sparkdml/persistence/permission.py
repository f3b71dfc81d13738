"""Permission to load pickles: loading one executes the file's code, so the user must allow it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ALLOW_PICKLE_VARIABLE = "SPARKDML_ALLOW_PICKLE"

_allowed: ContextVar[bool] = ContextVar("sparkdml_allow_pickle", default=False)


@contextmanager
def allow_pickle() -> Iterator[None]:
    """Let `load` read pickled side files, in this thread and within this block alone.

    Use only with trusted files: unpickling executes code.

    >>> with sparkdml.allow_pickle():
    ...     model = sparkdml.TorchModel.load(path)
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def is_pickle_allowed() -> bool:
    return _allowed.get() or os.environ.get(ALLOW_PICKLE_VARIABLE) == "1"
