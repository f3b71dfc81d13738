"""One line of progress at the driver."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm


class Progress:
    """A tqdm bar over the rows of all epochs; plain lines, one an epoch, where there is no tty."""

    def __init__(self, epochs: int, enabled: bool) -> None:
        self._epochs = epochs
        self._enabled = enabled
        self._lines = not sys.stderr.isatty() and "ipykernel" not in sys.modules
        self._bar: Any = None
        if enabled and not self._lines:
            self._bar = tqdm(total=epochs, unit="epoch", desc="starting", leave=True)

    def handle(self, rank: int, message: dict[str, Any]) -> None:
        """An event from a worker."""
        if not self._enabled:
            return
        if message.get("kind") == "already-trained":
            self._say(
                f"already trained ({message['step']:,} steps): the model comes from its last "
                "checkpoint. Use another path to train anew"
            )
        elif message.get("kind") == "progress" and self._bar is not None:
            done = message["epoch"] - 1
            if message["of"]:
                done += min(1.0, message["rows"] / message["of"])
            self._show(message["epoch"], done, f"loss {message['loss']:.4g}")
        elif message.get("kind") == "epoch":
            row = message["row"]
            numbers = ", ".join(
                f"{name} {value:.4g}"
                for name, value in row.items()
                if name not in ("epoch", "rows", "steps", "seconds", "rows_per_second")
            )
            text = f"{numbers}, {row['rows_per_second']:,.0f} rows/s"
            if self._bar is not None:
                self._show(int(row["epoch"]), row["epoch"], text)
            else:
                epoch = int(row["epoch"])
                self._say(f"epoch {epoch}/{self._epochs}: {text}")

    def _say(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def _show(self, epoch: int, done: float, text: str) -> None:
        self._bar.n = round(done, 2)
        self._bar.set_description_str(f"epoch {epoch}/{self._epochs}", refresh=False)
        self._bar.set_postfix_str(text, refresh=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
