"""Warns of each restart, where no line of progress would tell of it."""

from __future__ import annotations

import warnings

from sparkdml.observe.observers import Event


class RestartWarnings:
    """An observer for runs that are otherwise silent."""

    def handle(self, rank: int, event: Event) -> None:
        if event["kind"] == "restart":
            warnings.warn(
                f"{event['cause']}. Going on from step {event['from_step']} (restart "
                f"{event['without_progress']} of {event['allowed']} without progress)",
                stacklevel=2,
            )

    def close(self) -> None:
        """Nothing is open."""
