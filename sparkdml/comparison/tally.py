"""An observer that adds up what the ranks of a run tell: their time, bytes and messages."""

from __future__ import annotations

from typing import Any

PARTS = ("compute_seconds", "communication_seconds", "sent_bytes", "messages")


class Tally:
    """Sums over the whole run, restarts included."""

    def __init__(self) -> None:
        self.workers = 0
        self._sums = dict.fromkeys(PARTS, 0.0)

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "submission":
            self.workers = int(event["workers"])
        elif event["kind"] == "rank":
            seconds = event["seconds"]
            self._sums["compute_seconds"] += seconds.get("compute", 0.0) + seconds.get("data", 0.0)
            self._sums["communication_seconds"] += seconds.get("communication", 0.0)
            self._sums["sent_bytes"] += event.get("bytes", 0)
            self._sums["messages"] += event.get("messages", 0)
        elif event["kind"] == "client":  # of a parameter server: what it sent to this worker
            self._sums["sent_bytes"] += event["bytes_pulled"]
            self._sums["messages"] += event["pulls"]
        elif event["kind"] == "communicator":  # of a group, which has no rows
            self._sums["sent_bytes"] += event["bytes"]
            self._sums["messages"] += event["messages"]

    def means(self) -> dict[str, Any]:
        """Of a worker: what helpers without rows (communicators, servers) sent is shared out."""
        return {name: total / max(1, self.workers) for name, total in self._sums.items()}

    def close(self) -> None:
        """Nothing to give back; the sums stay."""
