"""Tasks that stand beside all runs of this process until somebody ends them: they take slots.

A run that counted on these slots would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sparkdml.runtime.roles import Role

_lock = threading.Lock()
_standing: list[Role] = []


@contextmanager
def standing(role: Role) -> Iterator[None]:
    """While this lasts, all runs find the slots of these tasks taken."""
    with _lock:
        _standing.append(role)
    try:
        yield
    finally:
        with _lock:
            _standing.remove(role)


def standing_roles() -> list[Role]:
    with _lock:
        return list(_standing)
