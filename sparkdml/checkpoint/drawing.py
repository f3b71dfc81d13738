"""The lineage as an SVG: steps from left to right, one lane for each submission, oldest on top.

Driver only; pure. The drawing is a string, so no plotting library is needed. Inside a notebook's
page it takes its colour from `currentColor` and follows the page's theme; as a file or an image it
follows the reader's light or dark preference. Labels have a column of their own beside the lanes,
so that they can't overlap the drawing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdml.checkpoint.listing import (
    began,
    clean,
    count,
    ended,
    metric,
    moment,
    outcome,
    several,
    size,
    summary,
    unknown,
)
from sparkdml.checkpoint.manifest import Manifest, Submission
from sparkdml.observe import svg

if TYPE_CHECKING:
    from sparkdml.checkpoint.graph import Graph


PLOT_START, PLOT_END = 286, 884
HEAD = 44  # where the lanes begin
BEND = 10.0  # radius of the curve from a checkpoint down to a lane

# Lanes have room for four, three or one line of text beside them, depending on their number.
_LANE_HEIGHTS = ((66, 6), (54, 12), (30, 24))
_LEAST_LANE_HEIGHT = 22


@dataclass(frozen=True)
class Lane:
    """A submission's line, from the checkpoint that it resumed from to where it ended."""

    number: int
    submission: Submission | None  # None: its record is gone
    own: Sequence[Manifest]
    start: Manifest | None
    y: float

    @property
    def first_step(self) -> int:
        return self.start.step if self.start else self.own[0].step if self.own else 0

    @property
    def saved_step(self) -> int:
        return self.own[-1].step if self.own else self.first_step

    @property
    def last_step(self) -> int:
        reached = self.submission.failed_at_step if self.submission else None
        return max(self.saved_step, reached or 0)

    @property
    def end(self) -> str | None:
        """The mark at its end, if the last checkpoint isn't the end."""
        if self.submission is None or self.submission.outcome == "finished":
            return None
        return "running" if self.submission.outcome == "running" else "failed"


@dataclass
class Crowd:
    """Checkpoints of the same kind that would touch each other, drawn as one long mark."""

    shape: str
    main: bool  # on the main line
    begin: float
    end: float
    members: list[Manifest] = field(default_factory=list)

    def keep_clear_of(self, x: float, room: float) -> None:
        """Shorten the mark at the end that is nearer to x, as far as it has any length."""
        if x <= self.begin:
            self.begin = min(self.end, max(self.begin, x + room))
        elif x >= self.end:
            self.end = max(self.begin, min(self.end, x - room))


class Layout:
    def __init__(self, lineage: Graph) -> None:
        self.lineage = lineage
        recorded = {submission.number for submission in lineage.submissions}
        numbers = sorted(recorded | {manifest.submission for manifest in lineage.manifests})
        fitting = [height for height, most in _LANE_HEIGHTS if len(numbers) <= most]
        self.lane_height = fitting[0] if fitting else _LEAST_LANE_HEIGHT
        self.radius = 5.0 if len(lineage.manifests) <= 60 and len(numbers) <= 24 else 3.5
        self.lanes = {
            number: self._lane(number, HEAD + self.lane_height * (place + 0.5))
            for place, number in enumerate(numbers)
        }
        self.bottom = HEAD + self.lane_height * len(numbers)
        self.last_step = max((lane.last_step for lane in self.lanes.values()), default=0) or 1
        self.crowds = {number: self._crowds(lane) for number, lane in self.lanes.items()}

    def _lane(self, number: int, y: float) -> Lane:
        submission, own = self.lineage.submission(number), self.lineage.of_submission(number)
        start = self.lineage.get(submission.resumed_from) if submission else None
        if start is None and own:
            start = self.lineage.parent(own[0])
        return Lane(number, submission, own=own, start=start, y=y)

    def x(self, step: int) -> float:
        return PLOT_START + (PLOT_END - PLOT_START) * step / self.last_step

    def end_x(self, lane: Lane) -> float:
        """Beside the last checkpoint's mark, not on it."""
        return max(self.x(lane.last_step), self.x(lane.saved_step) + 2.5 * self.radius + 2)

    def arrival_x(self, lane: Lane) -> float:
        """Where the curve down becomes level: at the first mark, or before it."""
        x = self.x(lane.first_step)
        if not self.origin(lane):
            return x
        marks = [crowd.begin for crowd in self.crowds[lane.number]] or [self.end_x(lane)]
        return max(x, min(x + BEND, min(marks) - self.radius))

    def origin(self, lane: Lane) -> Lane | None:
        """The lane that it forks from."""
        if lane.start is None or lane.start.submission == lane.number:
            return None
        return self.lanes.get(lane.start.submission)

    def is_main(self, lane: Lane) -> bool:
        return any(map(self.lineage.on_line, lane.own))

    def has_mark_at(self, lane: Lane, x: float) -> bool:
        near = self.radius + 3
        return any(crowd.begin - near < x < crowd.end + near for crowd in self.crowds[lane.number])

    def _crowds(self, lane: Lane) -> list[Crowd]:
        """The lane's checkpoints in drawing order: existing ones over pruned ones."""
        room = 2 * self.radius + 1.5
        found: dict[tuple[str, bool], list[Crowd]] = {}
        for manifest in lane.own:
            single = manifest.kind in ("root", "final") and not manifest.pruned
            shape = "pruned" if manifest.pruned else manifest.kind if single else "checkpoint"
            look = (shape, self.lineage.on_line(manifest))
            alike = found.setdefault(look, [])
            x = self.x(manifest.step)
            if single or not alike or x - alike[-1].end > room:
                alike.append(Crowd(*look, x, x))
            alike[-1].end = x
            alike[-1].members.append(manifest)
        order = ["pruned", "checkpoint", "root", "final"]
        crowds = [c for look in sorted(found, key=lambda k: order.index(k[0])) for c in found[look]]
        last_main = [self.x(m.step) for m in lane.own if self.lineage.on_line(m)][-1:]
        singles = [crowd.begin for crowd in crowds if crowd.shape in ("root", "final")]
        for crowd in crowds:
            for x in singles + ([] if crowd.main else last_main):
                crowd.keep_clear_of(x, room)
        return crowds


def round_unit(last: int, most: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, … that fits into `last` at most `most` times."""
    power = 1
    while last > 5 * power * most:
        power *= 10
    return next(power * factor for factor in (1, 2, 5) if last <= power * factor * most)


WIDTH = 920
MARGIN, INDENT, LABELS_END = 16, 42, 264

# What the legend can explain, in its order.
_MARKS = {"checkpoint": "checkpoint", "pruned": "pruned", "root": "root", "final": "final"}
_MARKS |= {"failed": "failure", "running": "running"}
_LINES = {"main": "main line", "faded": "given up", "dotted": "after the last checkpoint"}


def draw(lineage: Graph) -> str:
    return _Drawing(lineage).document()


class _Drawing:
    def __init__(self, lineage: Graph) -> None:
        self.lineage = lineage
        self.at = Layout(lineage)
        self.used: set[str] = set()  # what the legend must explain

    def document(self) -> str:
        parts = [svg.text(MARGIN, 24, summary(self.lineage), 13, weight=600)]
        lanes = self.at.lanes.values()
        if lanes:
            parts += self._axis()
            # The main line's lanes are drawn last, over those that share a part of their path.
            parts += [self._descent(lane) for lane in sorted(lanes, key=self.at.is_main)]
            for lane in lanes:
                parts += [self._labels(lane), *self._tracks(lane), *self._marks(lane)]
            parts += self._legend(self.at.bottom + 50)
        name = f"Lineage of checkpoints: {summary(self.lineage)}"
        return svg.document(WIDTH, self.at.bottom + 64 if lanes else HEAD, name, parts)

    def _axis(self) -> list[str]:
        """Draw round steps: a faint line up from each, their numbers below."""
        bottom = self.at.bottom
        parts = [svg.path(f"M{PLOT_START} {bottom}H{PLOT_END}", "axis")]
        for step in range(0, self.at.last_step + 1, round_unit(self.at.last_step, most=8)):
            x = self.at.x(step)
            parts.append(svg.path(f"M{x:.1f} {HEAD}V{bottom}", "grid"))
            parts.append(svg.text(x, bottom + 16, f"{step:,}", 11, anchor="middle", faded=True))
        parts.append(svg.text(LABELS_END, bottom + 16, "step", 11, anchor="end", faded=True))
        return parts

    def _labels(self, lane: Lane) -> str:
        """Draw a submission's workers and outcome; the tooltip has the full text."""
        submission = lane.submission
        if submission is None:
            return svg.group(
                [unknown(lane.number)],
                svg.text(MARGIN, lane.y + 4, str(lane.number), 11, weight=600),
                svg.text(INDENT, lane.y + 4, "its record is missing", 11, faded=True),
            )
        who = f"{submission.reason}, {count(submission.num_workers, 'worker')}"
        calm = lane.end != "failed"
        colour = svg.INK if calm else svg.TROUBLE
        tooltip = [began(self.lineage, submission), ended(submission)]
        if self.at.lane_height < 54:
            end = outcome(submission, short=True)
            if svg.text_width(who + end, 11) + 8 > LABELS_END - INDENT:
                end = submission.outcome
            return svg.group(
                tooltip,
                svg.text(MARGIN, lane.y + 4, str(lane.number), 11, weight=600),
                svg.text(INDENT, lane.y + 4, who, 11),
                svg.text(LABELS_END, lane.y + 4, end, 11, anchor="end", colour=colour, faded=calm),
            )
        cause = _wrapped(submission.cause or "", lines=2 if self.at.lane_height >= 66 else 1)
        top = lane.y - 3 - 6.5 * len(cause)
        return svg.group(
            tooltip,
            svg.text(MARGIN, top, str(lane.number), 13, weight=600),
            svg.text(INDENT, top, who, 12),
            svg.text(INDENT, top + 15, outcome(submission), 11, colour=colour, faded=calm),
            *(svg.text(INDENT, top + 29 + 13 * i, c, 10, faded=True) for i, c in enumerate(cause)),
        )

    def _descent(self, lane: Lane) -> str:
        """Draw the line from the checkpoint that a submission resumed from, down to its lane."""
        origin = self.at.origin(lane)
        if origin is None:
            return ""
        r = self.at.radius
        x, top, end = self.at.x(lane.first_step), origin.y + r, self.at.arrival_x(lane)
        between = [other for other in self.at.lanes.values() if origin.y < other.y < lane.y]
        if any(self.at.has_mark_at(other, x) for other in between):
            # That lane has a checkpoint of the same step: pass beside it.
            aside = -r - 5
            way = (
                f"M{x:.1f} {top:.1f}q0 5 {aside / 2:g} 5t{aside / 2:g} 5V{lane.y - BEND:.1f}"
                f"q0 {BEND:g} {BEND:g} {BEND:g}H{max(end, x + aside + BEND):.1f}"
            )
        elif end > x + 1:
            way = f"M{x:.1f} {top:.1f}V{lane.y - BEND:.1f}Q{x:.1f} {lane.y:g} {end:.1f} {lane.y:g}"
        else:
            way = f"M{x:.1f} {top:.1f}V{lane.y - r:.1f}"
        return self._line(way, "main" if self.at.is_main(lane) else "faded")

    def _tracks(self, lane: Lane) -> list[str]:
        """Draw the lane's line: what was kept, what was given up, what was never saved."""
        reach = self.at.radius - 0.8  # under the mark's rim, so that no gap shows
        holes = [(crowd.begin - reach, crowd.end + reach) for crowd in self.at.crowds[lane.number]]
        lasting = [manifest for manifest in lane.own if self.lineage.on_line(manifest)]
        x, parts = self.at.arrival_x(lane), []
        for last, stroke in ((lasting[-1:], "main"), (lane.own[-1:], "faded")):
            end = self.at.x(last[0].step) if last else x
            parts.append(self._line(svg.line_around(x, end, lane.y, holes), stroke))
            x = max(x, end)
        if lane.end:
            end = self.at.end_x(lane) - self.at.radius
            parts.append(self._line(svg.line_around(x, end, lane.y, holes), "dotted"))
        return parts

    def _line(self, way: str, stroke: str) -> str:
        if way:
            self.used.add(stroke)
        return svg.path(way, stroke)

    def _marks(self, lane: Lane) -> list[str]:
        parts = []
        for crowd in self.at.crowds[lane.number]:
            words = several(crowd.members) if len(crowd.members) > 1 else _facts(crowd.members[0])
            colour = svg.MAIN if crowd.main else svg.FADED
            where = (crowd.begin, crowd.end, lane.y, self.at.radius)
            parts.append(svg.mark(crowd.shape, *where, colour, [words]))
            self.used.add(crowd.shape)
        if lane.end and lane.submission:
            x, colour = self.at.end_x(lane), svg.TROUBLE if lane.end == "failed" else svg.MAIN
            where = (x, x, lane.y, 0.9 * self.at.radius)
            parts.append(svg.mark(lane.end, *where, colour, [ended(lane.submission)]))
            self.used.add(lane.end)
        return parts

    def _legend(self, y: float) -> list[str]:
        parts, x = [], float(MARGIN)
        for sample, words in (_MARKS | _LINES).items():
            if sample not in self.used:
                continue
            if sample in _LINES:
                parts.append(svg.path(f"M{x:.1f} {y:g}h18", sample))
            else:
                colour = svg.TROUBLE if sample == "failed" else svg.MAIN
                parts.append(
                    svg.mark(sample, x + 5, end=x + 5, y=y, r=4.5, colour=colour, tooltip=[])
                )
            x += 24 if sample in _LINES else 16
            parts.append(svg.text(x, y + 4, words, 11, faded=True))
            x += svg.text_width(words, 11) + 18
        return parts


def _facts(manifest: Manifest) -> str:
    facts = [f"step {manifest.step:,}", f"epoch {manifest.epoch:,}", manifest.kind]
    facts += [size(manifest.num_bytes), metric(manifest), moment(manifest.created)]
    return ", ".join(fact for fact in facts if fact) + (" (pruned)" if manifest.pruned else "")


def _wrapped(cause: str, lines: int) -> list[str]:
    room = int((LABELS_END - INDENT) / svg.text_width("x", 10))
    wrapped = textwrap.wrap(clean(cause), room)
    if len(wrapped) > lines:
        wrapped = wrapped[:lines]
        wrapped[-1] = wrapped[-1][: room - 1].rstrip() + "…"
    return wrapped
