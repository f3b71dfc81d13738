"""The lineage as text: a line for each checkpoint and each event, newest last, lanes for forks.

Driver only; pure. The newest comes last, where a terminal shows it without scrolling. The main line
stays in the first lane; abandoned branches are to its right, between the checkpoint where they
forked and the next one on the main line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING

from sparkdml.checkpoint.manifest import Manifest, Submission

if TYPE_CHECKING:
    from sparkdml.checkpoint.graph import Graph

SCREEN_LINES = 40
LONGEST_CAUSE = 100

_END_MARKS = {"finished": "✓", "failed": "✕", "lost": "✕", "running": "▹"}


@dataclass(frozen=True)
class _Row:
    lane: int
    mark: str
    content: Manifest | str  # a checkpoint, or an event as text


def listing(lineage: Graph, full: bool = False) -> str:
    rows = list(_rows(lineage, full))
    if not full:
        folded = list(_folded(rows, ends=2))
        rows = folded if len(folded) < SCREEN_LINES else list(_folded(rows, ends=1))
    graphs = ["│ " * row.lane + row.mark for row in rows]
    width = max(map(len, graphs), default=0)
    table = iter(_table([row.content for row in rows if isinstance(row.content, Manifest)]))
    lines = [
        f"{graph:<{width}}  {next(table) if isinstance(row.content, Manifest) else row.content}"
        for graph, row in zip(graphs, rows, strict=True)
    ]
    return "\n".join([summary(lineage), *[line.rstrip() for line in lines]])


def _rows(lineage: Graph, full: bool) -> Iterator[_Row]:
    waiting: list[tuple[int, Manifest | Submission | str]] = []

    def put(lane: int, branches: Sequence[Manifest | Submission]) -> None:
        """Push branches, so that the last one is shown last and stays in its lane."""
        for place, branch in enumerate(reversed(branches)):
            if place and isinstance(branch, Manifest):
                waiting.extend([(lane + 1, branch), (lane, "├─╮")])
            else:
                waiting.append((lane, branch))

    waiting.extend((0, start) for start in reversed(lineage.branches(None)))
    while waiting:
        lane, item = waiting.pop()
        if isinstance(item, str):
            yield _Row(lane, item, "")
        elif isinstance(item, Submission):
            yield _Row(lane, "▸", began(lineage, item))
            yield _Row(lane, _END_MARKS[item.outcome], ended(item, full))
        else:
            own = lineage.of_submission(item.submission)
            submission = lineage.submission(item.submission)
            if item.id == own[0].id:
                words = began(lineage, submission) if submission else unknown(item.submission)
                yield _Row(lane, "▸", words)
            if item.parent is not None and lineage.parent(item) is None:
                yield _Row(lane, "?", f"its parent {item.parent} is missing or unreadable")
            yield _Row(lane, _mark(item), item)
            if item.id == own[-1].id and submission:
                yield _Row(lane, _END_MARKS[submission.outcome], ended(submission, full))
            put(lane, lineage.branches(item))


def _folded(rows: Sequence[_Row], ends: int) -> Iterator[_Row]:
    """Shorten long chains without events to their ends and one line for the checkpoints between."""
    for (lane, plain), chain in groupby(rows, lambda row: (row.lane, _is_plain(row))):
        found = list(chain)
        middle = found[ends:-ends]
        if not plain or len(middle) < 2:
            yield from found
            continue
        hidden = [row.content for row in middle if isinstance(row.content, Manifest)]
        yield from found[:ends]
        yield _Row(lane, "⋮", several(hidden))
        yield from found[-ends:]


def _is_plain(row: _Row) -> bool:
    return isinstance(row.content, Manifest) and row.content.kind in ("step", "epoch")


def _mark(manifest: Manifest) -> str:
    if manifest.pruned:
        return "○"
    return {"root": "◎", "final": "■"}.get(manifest.kind, "●")


def _table(manifests: Sequence[Manifest]) -> list[str]:
    """Format one line each; numbers are right-aligned, words left-aligned."""
    cells = [
        (
            f"{m.step:,}",
            f"{m.epoch:,}",
            m.kind,
            size(m.num_bytes),
            moment(m.created),
            metric(m),
            "(pruned)" if m.pruned else "",
        )
        for m in manifests
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        f"step {step:>{widths[0]}}  epoch {epoch:>{widths[1]}}  {kind:<{widths[2]}}  "
        f"{num_bytes:>{widths[3]}}  {created:<{widths[4]}}  {value:<{widths[5]}}  {pruned}"
        for step, epoch, kind, num_bytes, created, value, pruned in cells
    ]


# -- sentences, which the drawing uses as well ---------------------------------------------------


def summary(lineage: Graph) -> str:
    """Summarize the run in one line."""
    if not lineage.manifests and not lineage.submissions:
        return "no checkpoints yet"
    pruned = sum(manifest.pruned for manifest in lineage.manifests)
    parts = [
        count(len(lineage.submissions), "submission"),
        count(len(lineage.manifests), "checkpoint") + (f" ({pruned:,} pruned)" if pruned else ""),
        size(sum(m.num_bytes for m in lineage.manifests if not m.pruned)),
    ]
    line = lineage.line()
    state = lineage.submissions[-1].outcome if lineage.submissions else "outcome unknown"
    between = " at " if state == "finished" else ", last checkpoint at "
    last = f"{between}step {line[-1].step:,}" if line else ""
    return f"{', '.join(parts)}; {state}{last}"


def began(lineage: Graph, submission: Submission) -> str:
    workers = count(submission.num_workers, "worker")
    when = moment(submission.started)
    if submission.resumed_from is None:
        again = "" if submission.reason == "start" else f" ({submission.reason})"
        return f"submission {submission.number}: started with {workers}{again}, {when}"
    start = lineage.get(submission.resumed_from)
    where = f"step {start.step:,}" if start else f"{clean(submission.resumed_from)}, which is gone,"
    return (
        f"submission {submission.number}: resumed from {where} with {workers} "
        f"({submission.reason}), {when}"
    )


def ended(submission: Submission, full: bool = True) -> str:
    cause = clean(submission.cause or "")
    if not full and len(cause) > LONGEST_CAUSE:
        cause = cause[: LONGEST_CAUSE - 1].rstrip() + "…"
    words = f"submission {submission.number} {outcome(submission)}"
    return f"{words}: {cause}" if cause else words


def outcome(submission: Submission, short: bool = False) -> str:
    step = submission.failed_at_step
    at = "" if step is None else f" at {step:,}" if short else f" at step {step:,}"
    return {
        "finished": "finished",
        "failed": f"failed{at}",
        "lost": f"lost{at}" if short else f"was lost with its driver{at}",
        "running": "is running",
    }[submission.outcome]


def several(manifests: Sequence[Manifest]) -> str:
    """Summarize many checkpoints in one line."""
    pruned = sum(manifest.pruned for manifest in manifests)
    how_many = "" if pruned == len(manifests) else f"{pruned:,} "
    steps = f"steps {manifests[0].step:,} to {manifests[-1].step:,}"
    note = f" ({how_many}pruned)" if pruned else ""
    return f"{count(len(manifests), 'checkpoint')}, {steps}{note}"


def metric(manifest: Manifest) -> str:
    """Format the most important metric: the validation loss, else the loss, else the first."""
    names = [name for name in ("val_loss", "loss", *manifest.metrics) if name in manifest.metrics]
    return f"{clean(names[0])} {manifest.metrics[names[0]]:.4g}" if names else ""


def moment(seconds: float) -> str:
    """Format a time in the reader's time zone."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def size(num_bytes: int) -> str:
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.{1 if value < 99.95 and units[0] != 'B' else 0}f} {units[0]}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def clean(text: str) -> str:
    """Return the text in one line, without characters that break a terminal or an XML reader."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def unknown(number: int) -> str:
    return f"submission {number}: its record is missing or unreadable"
