"""Progress of a run: a bar in a terminal or a notebook, plain lines in a log.

Runs in the driver, on the observers' thread; `Progress` lives as long as the run and owns its tqdm
bar. It speaks to stderr only. `Throughput`, which works out the speed and the time that is left,
is pure: it counts rows and is given the times.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any

from tqdm.auto import tqdm

from sparkdml.errors import ParameterError
from sparkdml.history_columns import NOT_CURVES
from sparkdml.observe.stragglers import Straggler, Times, describe_ranks

WINDOW_SECONDS = 30.0  # long enough to take in a checkpoint or a short validation


class Throughput:
    """Rows per second of all ranks together, over the last half minute."""

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._points: deque[tuple[float, float]] = deque()  # time, rows since the last restart
        self._epoch = 0
        self._rows = 0.0  # of the epoch, at the last count
        self._counted = 0.0
        self._rows_left: float | None = None

    def restart(self) -> None:
        """Forget the past: steps since the last checkpoint are repeated, after a pause."""
        self._points.clear()
        self._epoch, self._counted = 0, 0.0

    def count(self, moment: float, epoch: int, rows: float, of: float | None) -> None:
        """`rows` rows of this epoch are done, of `of` rows if that is known."""
        if not self._points:
            grown = 0.0  # a resumed epoch begins with rows that were trained before
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
    """Format a duration as 0:42, 12:05 or 3:20:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """Format a count in few characters: 987, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    raise AssertionError("the last unit fits every number")


LINE_SECONDS = 30.0  # between two lines within a long epoch, where there is no bar
MAX_TRACEBACK_LINES = 40
MIN_BAR = 18  # columns, with its percentage
BAR = "{desc}: {percentage:3.0f}%|{bar}| "  # then the facts; tqdm's own postfix has a comma first


class Progress:
    """An observer that prints how the run goes.

    `verbose`: 0 prints nothing; 1 the bar (or lines), backend and topology, restarts, and why a run
    stopped early; 2 also checkpoints, an evaluator's results, failures with their tracebacks, each
    rank's time in each epoch, and the stragglers at the end.
    """

    def __init__(self, epochs: int, verbose: int) -> None:
        if verbose not in (0, 1, 2):
            raise ParameterError("verbose", verbose, "0 (silent), 1 (progress) or 2 (details)")
        self._epochs, self._verbose = epochs, int(verbose)
        self._throughput = Throughput(epochs)
        self._workers: int | None = None
        self._backend = self._topology = ""
        self._epochs_done = self._num_restarts = 0
        self._ranks: dict[int, Times] = {}  # in this epoch
        self._epoch_to_sum_up: int | None = None
        self._last_line = time.monotonic()
        self._bar: Any = None
        if verbose and is_watched():
            self._bar = tqdm(
                total=epochs, desc="starting", bar_format=BAR, dynamic_ncols=True, leave=True
            )

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        if not self._verbose:
            return
        handler = getattr(self, "_on_" + event["kind"].replace("-", "_"), None)
        if handler is not None:
            handler(rank, event)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    # -- events ---------------------------------------------------------------------------------

    def _on_run_start(self, rank: int, event: dict[str, Any]) -> None:
        self._workers = event.get("workers")
        if self._verbose > 1:
            facts = {name: event.get(name) for name in ("workers", "strategy", "backend", "seed")}
            known = ", ".join(
                f"{name} {value}" for name, value in facts.items() if value is not None
            )
            self._say(f"{event.get('name', 'run')}: {known}")

    def _on_submission(self, rank: int, event: dict[str, Any]) -> None:
        self._workers = event["workers"]
        self._backend = event.get("backend") or ""
        self._throughput.restart()
        self._ranks, self._epoch_to_sum_up = {}, None

    def _on_topology(self, rank: int, event: dict[str, Any]) -> None:
        if event["used"] != self._topology:
            self._topology = event["used"]
            if self._bar is None or self._verbose > 1:
                self._say(f"backend {self._backend}, topology {self._topology}")

    def _on_steps(self, rank: int, event: dict[str, Any]) -> None:
        epoch, rows, of = event["epoch"], event["rows"], event["of"]
        self._throughput.count(event.get("time", time.time()), epoch, rows, of)
        share = min(1.0, rows / of) if of else 0.0
        facts = {"step": f"step {event['step']:,}", "loss": f"loss {event['loss']:.4g}"}
        facts |= self._speed()
        if self._bar is not None:
            self._show(epoch, epoch - 1 + share, facts)
        elif time.monotonic() - self._last_line > LINE_SECONDS:
            done = f", {share:.0%}" if of else ""
            self._say(f"{self._title(epoch)}{done}: {', '.join(facts.values())}")

    def _on_rank(self, rank: int, event: dict[str, Any]) -> None:
        if self._verbose > 1 and event["steps"]:
            self._ranks.setdefault(rank, Times(event["host"])).add(event)
            if len(self._ranks) == self._workers:
                self._sum_up()

    def _on_epoch(self, rank: int, event: dict[str, Any]) -> None:
        row = event["row"]
        self._epochs_done = epoch = int(row["epoch"])
        facts = {
            name: f"{name} {value:.4g}" for name, value in row.items() if name not in NOT_CURVES
        }
        facts["speed"] = f"{short(row['rows_per_second'])} samples/s"
        if self._bar is not None:
            self._show(epoch, epoch, facts)
        if self._bar is None or self._verbose > 1:
            self._say(f"{self._title(epoch)}: {', '.join(facts.values())}")
        self._sum_up()  # the epoch before, if some rank has sent nothing since
        self._epoch_to_sum_up = epoch
        if len(self._ranks) == self._workers:
            self._sum_up()

    def _on_checkpoint(self, rank: int, event: dict[str, Any]) -> None:
        if self._verbose > 1:
            self._say(
                f"checkpoint {event['id']} ({event['ckpt_kind']}) at step {event['step']:,}: "
                f"{short(event['bytes'])}B, copied in {event['copy_seconds']:.3f} s, written in "
                f"{event['write_seconds']:.2f} s"
            )

    def _on_evaluation(self, rank: int, event: dict[str, Any]) -> None:
        if self._verbose > 1:
            found = ", ".join(f"{name} {value:.4g}" for name, value in event["values"].items())
            self._say(f"evaluator: {found} after step {event['step']:,}")

    def _on_failure(self, rank: int, event: dict[str, Any]) -> None:
        if self._verbose > 1:
            self._say(f"failed: {event['cause']}")
            for line in (event.get("traceback") or "").rstrip().splitlines()[-MAX_TRACEBACK_LINES:]:
                self._say(f"  {line}")

    def _on_restart(self, rank: int, event: dict[str, Any]) -> None:
        self._num_restarts += 1
        self._workers = event.get("workers", self._workers)
        self._throughput.restart()
        workers = "" if self._workers is None else f" with {count(self._workers, 'worker')}"
        self._say(
            f"restart {self._num_restarts}: resuming from step {event['from_step']:,}{workers} "
            f"({event['cause']})"
        )
        if self._bar is not None:
            self._draw(f"restart {self._num_restarts}", f"from step {event['from_step']:,}")

    def _on_note(self, rank: int, event: dict[str, Any]) -> None:
        self._say(event["text"])

    def _on_already_trained(self, rank: int, event: dict[str, Any]) -> None:
        self._say(
            f"this run is already complete ({event['step']:,} steps): returning its final model. "
            "Use a new path to train again"
        )
        if self._bar is not None:
            self._show(self._epochs, self._epochs, {})

    def _on_run_end(self, rank: int, event: dict[str, Any]) -> None:
        self._sum_up()
        if event.get("stopped"):
            self._say(f"stopped after epoch {self._epochs_done}: {event['stopped']}")
        if self._verbose > 1:
            self._say(f"{event['outcome']} after {clock(event['seconds'])}")
            for straggler in event.get("stragglers") or []:
                self._say(f"straggler: {Straggler.from_dict(straggler)}")

    def _sum_up(self) -> None:
        """Print the ranks' times of the last epoch, which arrive a moment after its end."""
        if self._epoch_to_sum_up is None:
            return
        for line in describe_ranks(self._ranks):
            self._say(f"epoch {self._epoch_to_sum_up}, {line}")
        self._ranks, self._epoch_to_sum_up = {}, None

    # -- output ---------------------------------------------------------------------------------

    def _title(self, epoch: int) -> str:
        again = f" (restart {self._num_restarts})" if self._num_restarts else ""
        return f"epoch {epoch}/{self._epochs}{again}"

    def _speed(self) -> dict[str, str]:
        facts = {}
        if (rate := self._throughput.rows_per_second) is not None:
            facts["speed"] = f"{short(rate)} samples/s"
        if self._workers is not None:
            facts["workers"] = count(self._workers, "worker")
        if self._topology:
            facts["topology"] = f"{self._backend} ({self._topology})"
        if (left := self._throughput.seconds_left) is not None:
            facts["left"] = f"{clock(left)} left"
        return facts

    def _show(self, epoch: int, done: float, facts: dict[str, str]) -> None:
        self._bar.n = round(done, 3)
        title, columns = self._title(epoch), self._bar.ncols
        room = columns - len(title) - MIN_BAR if isinstance(columns, int) and columns else None
        self._draw(title, fitting(facts, room))

    def _draw(self, title: str, text: str) -> None:
        self._bar.bar_format = BAR + text.replace("{", "{{").replace("}", "}}")
        self._bar.set_description_str(title, refresh=True)

    def _say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def is_watched() -> bool:
    """Whether stderr is a terminal that can redraw a line, or this is a notebook."""
    if sys.stderr.isatty():
        return os.environ.get("TERM") != "dumb"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def fitting(facts: dict[str, str], room: int | None) -> str:
    """The facts in their order, without the least important ones if there is no room for all."""
    kept = dict(facts)
    for name in ("topology", "workers", "step", "speed", *reversed(facts)):
        if room is None or len(kept) < 2 or len(", ".join(kept.values())) <= room:
            break
        kept.pop(name, None)
    return ", ".join(kept.values())


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
