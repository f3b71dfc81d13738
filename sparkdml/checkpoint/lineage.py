"""What `Checkpoints.lineage()` returns, at the driver: a run's graph, as text and as a drawing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sparkdml.checkpoint.drawing import draw
from sparkdml.checkpoint.graph import Graph
from sparkdml.checkpoint.listing import listing


class Lineage(Graph):
    """The graph of a run, to print or to show in a notebook."""

    def text(self, full: bool = False) -> str:
        """Return the graph as text, newest last; with `full`, nothing is omitted or shortened."""
        return listing(self, full)

    def svg(self) -> str:
        """Return the graph as an SVG: steps from left to right, a lane for each submission."""
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
        # As HTML too: a notebook shows an SVG as an image, which has neither the notebook's colours
        # nor tooltips; inside HTML it has both.
        svg = self.svg()
        bundle = {"text/plain": self.text(), "image/svg+xml": svg, "text/html": svg}
        return {
            kind: content
            for kind, content in bundle.items()
            if (not include or kind in include) and kind not in (exclude or ())
        }
