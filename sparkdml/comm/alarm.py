"""How a failure that one rank has noticed reaches those that wait in silence.

When a process dies, gloo tells the ranks that were just reading from it. Others may wait, in a ring
of three or more, for a neighbour that has given up, until a time-out of minutes. So whoever
notices a failure writes it into the driver's store, and whoever waits looks there now and then.
The driver may write there too: it knows of workers that hang.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from sparkdml.errors import CommunicationError

LOOK_EVERY_SECONDS = 0.5

_KEY = "sparkdml/alarm"


class Alarm:
    """One for a whole run: `store` is the driver's, without a prefix."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def sound(self, reason: str) -> None:
        """Tell everybody; the first reason is kept. Never raises: there is an error already."""
        try:
            self._store.compare_set(_KEY, "", reason)
        except RuntimeError:
            return  # The store went with the driver, so nobody is left to be told.

    def check(self) -> None:
        """Raise CommunicationError if somebody has sounded the alarm."""
        try:
            if not self._store.check([_KEY]):
                return
            reason = self._store.get(_KEY).decode()
        except RuntimeError as error:
            raise CommunicationError("the driver's store is gone") from error
        raise CommunicationError(f"the run failed: {reason}")
