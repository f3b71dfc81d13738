"""Prints at the driver what the workers print, each line with its rank and host."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm


class OutputPrinter:
    """An observer of "output" events. Lines go above the progress bar, where there is one."""

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if event["kind"] != "output":
            return
        who = f"[rank {rank} on {event['host']}]"
        lines = [f"{who} {line}" for line in event["lines"]]
        if event.get("dropped"):
            lines.append(
                f"{who} … {event['dropped']:,} lines more were left out: it prints faster than is "
                "sent on. The executor's log has them all"
            )
        if lines:
            file = sys.stdout if event["stream"] == "stdout" else sys.stderr
            tqdm.write("\n".join(lines), file=file)
            file.flush()

    def close(self) -> None:
        """Nothing is kept back."""
