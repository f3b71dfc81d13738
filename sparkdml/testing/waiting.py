"""Waiting for another thread or process: as long as it takes, up to a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE_SECONDS = 20.0


def wait_until(condition: Callable[[], Value], seconds: float = PATIENCE_SECONDS) -> Value:
    """Wait until the condition's value is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"the condition did not become true within {seconds:g} s")
        time.sleep(0.005)
    return value
