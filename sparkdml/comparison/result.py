"""What a comparison brings: a table as text, as pandas, as HTML; a plot; a few sentences.

What became of one strategy, as numbers that can be compared; the arithmetic is pure.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparkdml.errors import SetupError

if TYPE_CHECKING:
    import pandas as pd

    from sparkdml.model import TorchModel


@dataclass(frozen=True)
class Outcome:
    """One row of the table. Seconds, bytes and messages are of a rank, the mean over all."""

    name: str
    workers: int = 0
    epochs: int = 0
    steps: int = 0  # see `result.LEGEND`
    seconds: float = math.nan  # of the epochs, without start-up and validation
    wall_seconds: float = math.nan  # of the whole fit
    compute_seconds: float = math.nan  # forward, backward, optimizer, and waiting for data
    communication_seconds: float = math.nan  # and waiting for slower ranks
    sent_bytes: float = math.nan  # to others, by a wire or through memory
    messages: float = math.nan
    loss: float = math.nan  # of the trained model on all rows
    metrics: Mapping[str, float] = field(default_factory=dict)
    distance: float = math.nan  # of its weights from the single process's, relative to their length
    error: str | None = None  # why there are no numbers

    @property
    def costs(self) -> tuple[float, float, float]:
        """Computation, communication, and what is lacking in accuracy."""
        return self.compute_seconds, self.sent_bytes, self.loss


def distance(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """How far two states of one model are apart, relative to the length of the reference."""
    apart = length = 0.0
    for name, expected in reference.items():
        if expected.is_floating_point():
            there = expected.detach().double().cpu()
            apart += float((found[name].detach().double().cpu() - there).square().sum())
            length += float(there.square().sum())
    return math.sqrt(apart / length) if length else math.sqrt(apart)


def on_frontier(costs: Sequence[Sequence[float]]) -> list[bool]:
    """The Pareto-optimal ones: no other is as good in everything and better in something."""

    def beats(one: Sequence[float], other: Sequence[float]) -> bool:
        pairs = list(zip(one, other, strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    return [
        all(math.isfinite(cost) for cost in mine) and not any(beats(other, mine) for other in costs)
        for mine in costs
    ]


_MEGA = 1e6
LEGEND = (
    "steps: what the strategy counts as one. A batch of every worker (where each steps by itself, "
    "of the one with the most); with local steps, Hogwild and ADPSGD a round of several, up to "
    "their synchronization; with second-order methods an iteration over all rows.",
    "MB sent, messages: sent over the network or through shared memory, as the mean over the "
    "workers; what servers and communicators send is divided among them. Memory that all workers "
    "have mapped (Hogwild's parameters, rows on the same host) does not count as sent.",
)
_LINES = ("-", "--", ":", "-.")
_RIGHT = ' style="text-align:right;padding:2px 8px"'


class Comparison(Sequence[Outcome]):
    """The outcomes in the order in which the strategies were given, the single process last."""

    def __init__(self, outcomes: Sequence[Outcome], models: Mapping[str, TorchModel]) -> None:
        self._outcomes = list(outcomes)
        self.models = dict(models)  # the fitted model of each strategy that came to its end

    def __getitem__(self, index: Any) -> Any:
        """By number, or by the strategy's name."""
        if isinstance(index, str):
            by_name = {one.name: one for one in self._outcomes}
            if index not in by_name:
                raise KeyError(f"no strategy {index!r}: there are {', '.join(map(repr, by_name))}")
            return by_name[index]
        return self._outcomes[index]

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def frontier(self) -> list[str]:
        """The names of those that no other one beats in computation, communication and loss."""
        kept = on_frontier([one.costs for one in self._outcomes])
        return [one.name for one, stays in zip(self._outcomes, kept, strict=True) if stays]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What `to_pandas` has, as plain values."""
        frontier = set(self.frontier)
        return [
            {
                "strategy": one.name,
                "workers": one.workers,
                "seconds": one.seconds,
                "wall_seconds": one.wall_seconds,
                "steps": one.steps,
                "compute_seconds": one.compute_seconds,
                "communication_seconds": one.communication_seconds,
                "sent_megabytes": one.sent_bytes / _MEGA,
                "messages": one.messages,
                "loss": one.loss,
                **one.metrics,
                "distance": one.distance,
                "frontier": one.name in frontier,
                "error": one.error or "",
            }
            for one in self._outcomes
        ]

    def to_pandas(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows)

    def describe(self) -> list[str]:
        """What the numbers say, in a sentence each."""
        trained = [one for one in self._outcomes if one.error is None]
        return (self._compare(trained) if trained else []) + [
            f"{one.name} failed: {one.error}" for one in self._outcomes if one.error is not None
        ]

    def _compare(self, trained: Sequence[Outcome]) -> list[str]:
        fastest = min(trained, key=lambda one: one.seconds)
        least = min(trained, key=lambda one: one.sent_bytes)
        said = [f"{fastest.name} trained fastest, in {fastest.seconds:.3g} s"]
        judged = [one for one in trained if math.isfinite(one.loss)]
        if judged:
            lowest = min(judged, key=lambda one: one.loss)
            said.append(f"{lowest.name} ended with the lowest loss, {lowest.loss:.4g}")
        said.append(
            f"{least.name} sent the least data, {least.sent_bytes / _MEGA:.3g} MB per worker"
        )
        sentences = ["; ".join(said) + "."]
        away = [one for one in trained if math.isfinite(one.distance) and one.distance > 0]
        if away:
            near = min(away, key=lambda one: one.distance)
            far = max(away, key=lambda one: one.distance)
            sentences.append(
                "Relative distance from the single-process weights: "
                f"{near.name} {near.distance:.2g}, {far.name} {far.distance:.2g}."
            )
        beaten = [one.name for one in trained if one.name not in self.frontier]
        if beaten:
            sentences.append(
                "Not Pareto-optimal (another one is at least as good in computation, communication "
                f"and loss, and better in one of them): {', '.join(beaten)}."
            )
        return sentences

    def plot(self, ax: Sequence[Any] | None = None) -> Any:
        """The loss over the seconds of training, and over what a rank sent; matplotlib's figure."""
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise SetupError("plots need matplotlib: pip install 'sparkdml[plot]'") from error
        if ax is None:
            figure, made = plt.subplots(1, 2, figsize=(11, 4), squeeze=False)
            ax = list(made[0])
            figure.set_layout_engine("constrained")
        over_time, over_bytes = ax
        for number, one in enumerate(self._outcomes, start=1):
            if one.error is not None:
                continue
            history = self.models[one.name].history
            passed = [sum(history.seconds[: n + 1]) for n in range(len(history))]
            style = _LINES[(number - 1) // 10 % len(_LINES)]  # there are ten colours
            (line,) = over_time.plot(
                passed, history.loss, style, marker=".", label=f"{number}  {one.name}"
            )
            place = (one.sent_bytes / _MEGA, one.loss)
            marker = "D" if one.name in self.frontier else "o"
            over_bytes.scatter(*[[value] for value in place], color=line.get_color(), marker=marker)
            beside = {"textcoords": "offset points", "xytext": (5, 4)}  # a name would not fit
            over_bytes.annotate(str(number), place, fontsize=8, **beside)
        over_time.set(xlabel="seconds of training", ylabel="loss of each epoch")
        over_time.legend(frameon=False, fontsize=8)
        over_bytes.set(
            xlabel="MB sent by a worker (diamonds: unbeaten, with computation)",
            ylabel="loss at the end",
        )
        over_bytes.set_xscale("symlog", linthresh=0.01)
        for panel in ax:
            panel.spines[["top", "right"]].set_visible(False)
            heights = _heights(panel) or [0.0]
            if max(heights) > 10 * min(heights) > 0:
                panel.set_yscale("log")
        return over_time.figure

    def __repr__(self) -> str:
        table = self._cells()
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        return "\n".join([*lines, "", *self.describe(), "", *LEGEND])

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        cells = "".join(f"<th{_RIGHT}>{html.escape(cell)}</th>" for cell in head)
        body = "".join(
            "<tr>" + "".join(f"<td{_RIGHT}>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        sentences = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.describe())
        legend = "".join(f"<p><small>{html.escape(line)}</small></p>" for line in LEGEND)
        return (
            '<div class="sparkdml-comparison" style="max-width:100%;overflow-x:auto"><table>'
            f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{sentences}{legend}</div>"
        )

    def _cells(self) -> list[list[str]]:
        metrics = list(dict.fromkeys(name for one in self._outcomes for name in one.metrics))
        head = ["strategy", "workers", "seconds", "steps", "compute s", "communication s"]
        head += ["MB sent", "messages", "loss", *metrics, "distance", "unbeaten"]
        frontier = set(self.frontier)
        rows = [
            [
                one.name,
                f"{one.workers}",
                _show(one.seconds),
                f"{one.steps:,}",
                _show(one.compute_seconds),
                _show(one.communication_seconds),
                _show(one.sent_bytes / _MEGA),
                _show(one.messages),
                _show(one.loss),
                *(_show(one.metrics.get(name, math.nan)) for name in metrics),
                _show(one.distance),
                "*" if one.name in frontier else "",
            ]
            for one in self._outcomes
        ]
        return [head, *rows]


def _heights(panel: Any) -> list[float]:
    """What is drawn in it, as far as it is finite."""
    drawn = [float(y) for line in panel.lines for y in line.get_ydata()]
    drawn += [float(y) for dots in panel.collections for _, y in dots.get_offsets()]
    return [y for y in drawn if math.isfinite(y)]


def _show(value: float) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
