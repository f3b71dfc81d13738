"""What an evaluator measured while the workers trained, for the history of the fit."""

from __future__ import annotations

from typing import Any


class Evaluations:
    """An observer. `rows` are in the order of steps, each with what was measured after it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "evaluation":
            numbers = {name: event[name] for name in ("epoch", "step", "clock", "seconds")}
            self.rows.append({**numbers, **event["values"]})
        elif event["kind"] == "submission":
            # A run that goes on from a checkpoint makes the steps behind it again.
            self.rows = [row for row in self.rows if row["step"] <= event["from_step"]]

    def close(self) -> None:
        """They are read when the run is over."""
