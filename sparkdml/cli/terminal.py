"""Terminal output of the commands: colours and progress lines, both plain when redirected."""

from __future__ import annotations

import os
import sys
from typing import Literal, TextIO

Colour = Literal["green", "yellow", "red", "bold", "dim"]

_CODES: dict[Colour, str] = {"green": "32", "yellow": "33", "red": "31", "bold": "1", "dim": "2"}


def is_interactive(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: Colour, stream: TextIO | None = None) -> str:
    """Colour `text`, unless the stream is not a terminal or NO_COLOR is set."""
    if not is_interactive(stream or sys.stdout) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


class PercentLine:
    """Progress from 0 to 100: one updating line on a terminal, else a line per `step` percent."""

    def __init__(self, title: str, stream: TextIO | None = None, step: int = 10) -> None:
        self._title = title
        self._stream = stream or sys.stdout
        self._interactive = is_interactive(self._stream)
        self._step = 1 if self._interactive else step
        self._shown = -1

    def update(self, percent: int) -> None:
        """Show `percent`, unless as much was shown already: progress never goes backwards."""
        due = percent - percent % self._step
        if due <= self._shown:
            return
        self._shown = due
        if self._interactive:
            self._stream.write(f"\r{self._title} … {due:3d}%")
        else:
            self._stream.write(f"{self._title} … {due}%\n")
        self._stream.flush()

    def close(self) -> None:
        if self._interactive and self._shown >= 0:
            self._stream.write("\n")
            self._stream.flush()
