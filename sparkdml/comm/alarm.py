"""Propagates a failure that one rank has noticed to ranks that are blocked in a collective.

When a process dies, gloo raises in the ranks that were reading from it. In a ring of three or more,
the others would wait for a neighbour that has already failed, until a time-out of minutes. So the
rank that notices a failure writes it to the driver's TCPStore, and waiting ranks poll that key. The
driver writes there too when a worker hangs.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from sparkdml.errors import CommunicationError

_KEY = "sparkdml/alarm"


class Alarm:
    """The alarm of a run; `store` is the driver's, without a prefix."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sound(self, reason: str) -> None:
        """Notify all ranks; the first reason is kept. Never raises, as it is called on an error."""
        try:
            self._store.compare_set(_KEY, "", reason)
        except RuntimeError:
            return  # The store closed with the driver, so no rank is left to notify.

    def check(self) -> None:
        """Raise CommunicationError if a rank or the driver has sounded the alarm."""
        try:
            if not self._store.check([_KEY]):
                return
            reason = self._store.get(_KEY).decode()
        except RuntimeError as error:
            raise CommunicationError("the driver's store is gone") from error
        raise CommunicationError(f"the run failed: {reason}")
