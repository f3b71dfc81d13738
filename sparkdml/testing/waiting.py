"""Waiting for what another thread or process does: as long as it takes, but not forever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE_SECONDS = 20.0


def wait_until(condition: Callable[[], Value], seconds: float = PATIENCE_SECONDS) -> Value:
    """The condition's first value that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come to be within {seconds:g} s")
        time.sleep(0.005)
    return value
