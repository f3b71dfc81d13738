"""The lineage of a run as a graph: each checkpoint's parent, and the line to the newest state.

Driver only; pure. `listing` prints the graph, `drawing` draws it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sparkdml.checkpoint.keep import age_order
from sparkdml.checkpoint.manifest import Manifest, Submission


class Graph:
    """The checkpoints of a run, linked to their parents, and the submissions that took them.

    The main line leads from the root to the newest checkpoint of the last submission; what isn't on
    the main line was given up: work after a checkpoint from which a later submission resumed.
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
        """Return the parent; None for the root, and if the parent's manifest can't be read."""
        parent = self.get(manifest.parent)
        # A parent is always older. Following a damaged link could lead in a circle.
        return parent if parent and age_order(parent) < age_order(manifest) else None

    def submission(self, number: int) -> Submission | None:
        return self._by_number.get(number)

    def of_submission(self, number: int) -> Sequence[Manifest]:
        """Return the checkpoints that it has taken, oldest first."""
        return tuple(self._own.get(number, ()))

    def branches(self, manifest: Manifest | None) -> list[Manifest | Submission]:
        """Return what was trained from a checkpoint (None: from nothing), the main line last.

        These are checkpoints, and submissions that ended before they had taken one.
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
        """Return the newest on the main line at or before `step` that is not pruned."""
        there = (m for m in reversed(self._line) if m.step <= step and not m.pruned)
        return next(there, None)

    def after(self, manifest: Manifest) -> Manifest | None:
        """Return the next on the main line; None for its tip, and for one that isn't on it."""
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
