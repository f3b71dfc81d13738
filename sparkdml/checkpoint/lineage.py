"""The lineage of a run's states as a graph: which came from which, and the line that led to now.

Nodes are checkpoints, linked to their parents. Submissions say who trained from where and how it
ended. `listing` prints the graph, `drawing` draws it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sparkdml.checkpoint.drawing import draw
from sparkdml.checkpoint.keep import age_order
from sparkdml.checkpoint.listing import listing
from sparkdml.checkpoint.manifest import Manifest, Submission


class Lineage:
    """What became of a run: print it, or let a notebook show it.

    The main line leads from the root to the newest checkpoint of the last submission; whatever
    isn't on it was given up: work after a checkpoint from which a later submission went on.
    """

    def __init__(self, manifests: Sequence[Manifest], submissions: Sequence[Submission]) -> None:
        self.manifests = tuple(sorted(manifests, key=age_order))
        self.submissions = tuple(sorted(submissions, key=lambda s: s.number))
        self._by_id = {manifest.id: manifest for manifest in self.manifests}
        self._by_number = {submission.number: submission for submission in self.submissions}
        self._own: dict[int, list[Manifest]] = defaultdict(list)
        self._children: dict[str | None, list[Manifest | Submission]] = defaultdict(list)
        for manifest in self.manifests:
            self._own[manifest.submission].append(manifest)
            parent = self.parent(manifest)
            self._children[parent.id if parent else None].append(manifest)
        for submission in self.submissions:
            if not self._own.get(submission.number):
                start = self.get(submission.resumed_from)
                self._children[start.id if start else None].append(submission)
        self._line = self._trace()
        self._place = {manifest.id: place for place, manifest in enumerate(self._line)}

    # -- the graph ------------------------------------------------------------------------------

    def get(self, id: str | None) -> Manifest | None:
        return None if id is None else self._by_id.get(id)

    def parent(self, manifest: Manifest) -> Manifest | None:
        """None for the root, and where the parent's manifest is gone or unreadable."""
        parent = self.get(manifest.parent)
        # A parent is older. Were a damaged link followed, it could lead in a circle.
        return parent if parent and age_order(parent) < age_order(manifest) else None

    def submission(self, number: int) -> Submission | None:
        return self._by_number.get(number)

    def of_submission(self, number: int) -> Sequence[Manifest]:
        """The checkpoints that it has taken, oldest first."""
        return tuple(self._own.get(number, ()))

    def branches(self, manifest: Manifest | None) -> list[Manifest | Submission]:
        """What was trained from there (None: from nothing), the main line's last.

        Checkpoints, and submissions that ended before they had taken one.
        """
        return sorted(
            self._children.get(manifest.id if manifest else None, ()),
            key=lambda branch: (
                isinstance(branch, Manifest) and branch.id in self._place,
                branch.submission if isinstance(branch, Manifest) else branch.number,
                branch.step if isinstance(branch, Manifest) else -1,
            ),
        )

    # -- the main line --------------------------------------------------------------------------

    def line(self) -> list[Manifest]:
        """The main line, root first."""
        return list(self._line)

    def on_line(self, manifest: Manifest) -> bool:
        return manifest.id in self._place

    def nearest(self, step: int) -> Manifest | None:
        """The newest on the main line at or before `step` whose parts are still there."""
        there = (m for m in reversed(self._line) if m.step <= step and not m.pruned)
        return next(there, None)

    def after(self, manifest: Manifest) -> Manifest | None:
        """The next on the main line; None for its tip, and for one that isn't on it."""
        place = self._place.get(manifest.id, len(self._line))
        return self._line[place + 1] if place + 1 < len(self._line) else None

    def _trace(self) -> list[Manifest]:
        line = []
        node = self._tip()
        while node is not None:
            line.append(node)
            node = self.parent(node)
        return line[::-1]

    def _tip(self) -> Manifest | None:
        for submission in reversed(self.submissions):
            own = self._own.get(submission.number)
            tip = own[-1] if own else self.get(submission.resumed_from)
            if tip is not None:
                return tip
        return self.manifests[-1] if self.manifests else None

    # -- to look at -----------------------------------------------------------------------------

    def text(self, full: bool = False) -> str:
        """The graph for a terminal, newest last; `full` leaves out nothing and cuts nothing."""
        return listing(self, full)

    def svg(self) -> str:
        """The graph as a drawing: steps from left to right, a lane for each submission."""
        return draw(self)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        # As HTML, too: notebooks show an SVG as an image, which knows neither the notebook's
        # colours nor tooltips; inside HTML it has both.
        svg = self.svg()
        bundle = {"text/plain": self.text(), "image/svg+xml": svg, "text/html": svg}
        return {
            kind: content
            for kind, content in bundle.items()
            if (not include or kind in include) and kind not in (exclude or ())
        }
