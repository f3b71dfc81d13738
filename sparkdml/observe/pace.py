"""How fast a run goes, and how long it will still take: pure, from counts of rows and times."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 30.0  # long enough to take in a checkpoint or a short validation


class Pace:
    """Rows a second over the last half minute, of all ranks together."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._points: deque[tuple[float, float]] = deque()  # time, rows since the last restart
        self._epoch = 0
        self._rows = 0.0  # of the epoch, when last told
        self._counted = 0.0
        self._rows_left: float | None = None

    def restart(self) -> None:
        """What was trained since the last checkpoint is trained again, after a pause."""
        self._points.clear()
        self._epoch, self._counted = 0, 0.0

    def count(self, moment: float, epoch: int, rows: float, of: float | None) -> None:
        """So many rows of this epoch are done, of so many, if that is known."""
        if not self._points:
            grown = 0.0  # a resumed epoch had rows before: they were not trained in this time
        elif epoch == self._epoch:
            grown = rows - self._rows
        else:
            grown = rows
        self._counted += max(grown, 0.0)
        self._epoch, self._rows = epoch, rows
        self._points.append((moment, self._counted))
        while len(self._points) > 2 and moment - self._points[1][0] > WINDOW_SECONDS:
            self._points.popleft()
        self._rows_left = None
        if of:
            self._rows_left = max(of - rows, 0.0) + (self._epochs - epoch) * of

    @property
    def rows_per_second(self) -> float | None:
        if len(self._points) < 2:
            return None
        (begin, before), (end, after) = self._points[0], self._points[-1]
        return (after - before) / (end - begin) if end > begin and after > before else None

    @property
    def seconds_left(self) -> float | None:
        rate = self.rows_per_second
        return None if rate is None or self._rows_left is None else self._rows_left / rate


def clock(seconds: float) -> str:
    """As on a watch: 0:42, 12:05, 3:20:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """A count in few characters: 987, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    raise AssertionError("the last unit takes every number")
