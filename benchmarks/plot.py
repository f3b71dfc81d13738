"""The run as a picture: one panel per workload and metric, one bar per contender."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measurement import LOAD
from benchmarks.ratios import Spread, metrics_in, seconds_of
from benchmarks.report import Report

_OURS, _OTHERS = "#d9541e", "#9aa5b1"


def draw(report: Report, path: Path) -> None:
    """Write the picture to `path`. Raises ImportError where matplotlib isn't installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (workload, metric)
        for workload in report.workloads
        for metric in metrics_in(report.rounds.get(workload.name, []))
        if metric != LOAD
    ]
    if not panels:
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6.5 * columns, 0.6 + 2.6 * lines), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (workload, metric) in zip(axes.flat, panels, strict=False):
        rounds = report.rounds[workload.name]
        bars = [
            (contender, spread)
            for contender in reversed(report.contenders)
            if (spread := Spread.of(seconds_of(rounds, contender.name, metric))) is not None
        ]
        medians = [spread.median for _, spread in bars]
        drawn = axis.barh(
            [contender.name for contender, _ in bars],
            medians,
            xerr=[
                [spread.median - spread.low for _, spread in bars],
                [spread.high - spread.median for _, spread in bars],
            ],
            color=[_OURS if contender.ours else _OTHERS for contender, _ in bars],
            capsize=2,
        )
        axis.bar_label(drawn, [f" {median:.3g} s" for median in medians], fontsize=8)
        axis.margins(x=0.18)
        axis.set_title(f"{workload.name}, {metric}", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Seconds, shorter is better" + (" (--quick: not a measurement)" * report.quick))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
