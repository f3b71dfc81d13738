"""Where each thing of a lineage's drawing stands: lanes down the page, steps across it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkdml.checkpoint.manifest import Manifest, Submission

if TYPE_CHECKING:
    from sparkdml.checkpoint.lineage import Lineage

PLOT_START, PLOT_END = 286, 884
HEAD = 44  # where the lanes begin
BEND = 10.0  # of the way from a checkpoint down to a lane

# Room for four, three or one line of words beside a lane, up to so many lanes.
_LANE_HEIGHTS = ((66, 6), (54, 12), (30, 24))
_LEAST_LANE_HEIGHT = 22


@dataclass(frozen=True)
class Lane:
    """A submission's way, from the checkpoint it went on from to where it ended."""

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
    """Checkpoints of one look that would touch each other, drawn as one long mark."""

    shape: str
    main: bool  # on the main line
    begin: float
    end: float
    members: list[Manifest] = field(default_factory=list)

    def keep_clear_of(self, x: float, room: float) -> None:
        """Become shorter at the end that is nearer to x, as far as there is any length."""
        if x <= self.begin:
            self.begin = min(self.end, max(self.begin, x + room))
        elif x >= self.end:
            self.end = max(self.begin, min(self.end, x - room))


class Layout:
    def __init__(self, lineage: Lineage) -> None:
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
        return Lane(number, submission, own, start, y)

    def x(self, step: int) -> float:
        return PLOT_START + (PLOT_END - PLOT_START) * step / self.last_step

    def end_x(self, lane: Lane) -> float:
        """Beside the last checkpoint's mark, not on it."""
        return max(self.x(lane.last_step), self.x(lane.saved_step) + 2.5 * self.radius + 2)

    def arrival_x(self, lane: Lane) -> float:
        """Where the way down has become level: at the first mark, or before it."""
        x = self.x(lane.first_step)
        if not self.origin(lane):
            return x
        marks = [crowd.begin for crowd in self.crowds[lane.number]] or [self.end_x(lane)]
        return max(x, min(x + BEND, min(marks) - self.radius))

    def origin(self, lane: Lane) -> Lane | None:
        """The other lane that it comes from."""
        if lane.start is None or lane.start.submission == lane.number:
            return None
        return self.lanes.get(lane.start.submission)

    def is_main(self, lane: Lane) -> bool:
        return any(map(self.lineage.on_line, lane.own))

    def has_mark_at(self, lane: Lane, x: float) -> bool:
        near = self.radius + 3
        return any(crowd.begin - near < x < crowd.end + near for crowd in self.crowds[lane.number])

    def _crowds(self, lane: Lane) -> list[Crowd]:
        """The lane's checkpoints in the order to draw them: those still there over pruned ones."""
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
    """The smallest of 1, 2, 5, 10, 20, 50, … that fits into `last` at most so many times."""
    power = 1
    while last > 5 * power * most:
        power *= 10
    return next(power * factor for factor in (1, 2, 5) if last <= power * factor * most)
