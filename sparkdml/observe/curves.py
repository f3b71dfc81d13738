"""Curves over epochs as an SVG string: for a notebook, without a plotting library.

Pure functions, used at the driver by `History`. Text and axes take the page's own colour, so that
the drawing follows a light or a dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from sparkdml.observe import svg

WIDTH, HEIGHT = 330, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 44, 30
COLOURS = ("#3b82f6", "#ea7317")  # distinct on light and dark, and to the colour-blind
MAX_POINTS = 400  # more than a curve has pixels
MAX_DOTS = 40  # more dots would hide the curve

Point = tuple[float, float]


def draw_panel(title: str, epochs: Sequence[float], curves: Mapping[str, Sequence[float]]) -> str:
    """One panel; `curves` by their names in the legend, each with one value per epoch."""
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high = _range(finite)
    panel = _Panel(epochs[0], epochs[-1], low, high)
    parts = [svg.text(LEFT - 40, 18, _cut(title, 40), 13, weight=600), *panel.axes()]
    legend_x = float(LEFT)
    for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
        parts += panel.curve(epochs, values, colour, name)
        if len(curves) > 1:
            parts.append(f'<circle cx="{legend_x + 4:g}" cy="31" r="4" fill="{colour}"/>')
            parts.append(svg.text(legend_x + 12, 35, name, 11, faded=True))
            legend_x += 30 + svg.text_width(name, 11)
    return svg.document(WIDTH, HEIGHT, f"{title} over epochs", parts)


class _Panel:
    """Places of values in the drawing."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self.first, self.last, self.low, self.high = first, last, low, high

    def x(self, epoch: float) -> float:
        if self.last == self.first:
            return (LEFT + WIDTH - RIGHT) / 2
        return LEFT + (epoch - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> list[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = [svg.path(f"M{LEFT} {bottom}H{right}", "axis")]
        for value in ticks(self.low, self.high, most=5):
            y = self.y(value)
            parts.append(svg.path(f"M{LEFT} {y:.1f}H{right}", "grid"))
            parts.append(svg.text(LEFT - 6, y + 4, f"{value:.4g}", 10, anchor="end", faded=True))
        for epoch in ticks(self.first, self.last, most=6, whole=True):
            parts.append(
                svg.text(self.x(epoch), bottom + 14, f"{epoch:g}", 10, anchor="middle", faded=True)
            )
        middle = (LEFT + right) / 2
        parts.append(svg.text(middle, HEIGHT - 3, "epoch", 10, anchor="middle", faded=True))
        return parts

    def curve(
        self, epochs: Sequence[float], values: Sequence[float], colour: str, name: str
    ) -> list[str]:
        stride = -(-len(values) // MAX_POINTS)
        points = list(zip(epochs, values, strict=True))
        points = points[::-stride][::-1]  # the last one is always among them
        way, pen_up = [], True
        for epoch, value in points:
            if not math.isfinite(value):
                pen_up = True  # leave a gap
                continue
            way.append(f"{'M' if pen_up else 'L'}{self.x(epoch):.1f} {self.y(value):.1f}")
            pen_up = False
        line = (
            f'<path d="{"".join(way)}" stroke="{colour}" stroke-width="2" '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )
        seen = [point for point in points if math.isfinite(point[1])]
        # Where dots would hide the curve, they are invisible but still have a tooltip.
        opacity = 1 if len(seen) <= MAX_DOTS else 0
        dots = [
            f'<circle cx="{self.x(e):.1f}" cy="{self.y(v):.1f}" r="3" fill="{colour}" '
            f'fill-opacity="{opacity}"><title>{escape(name)}, epoch {e:g}: {v:.6g}</title></circle>'
            for e, v in seen
        ]
        return [line, *dots] if way else []


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most `most` round values within a range."""
    if high <= low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    if whole:
        unit = max(unit, 1.0)
    for factor in (1, 2, 5, 10, 20):
        step = unit * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    return [0.0 if n == 0 else n * step for n in range(first, last + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the range of the values."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
