"""The SVG elements that the drawings of a lineage and of curves are made of, as strings.

Pure functions, used at the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MAIN = "#3b82f6"
TROUBLE = "#e5484d"
FADED = "#8a919b"  # visible on light and dark; opaque, so that overlaps are no darker
INK = "currentColor"

_STROKES = {
    "main": f'stroke="{MAIN}" stroke-width="2"',
    "faded": f'stroke="{FADED}" stroke-width="1.5"',
    "dotted": f'stroke="{FADED}" stroke-width="1.5" stroke-dasharray="2 3"',
    "axis": f'stroke="{FADED}" stroke-width="1"',
    "grid": 'stroke="currentColor" stroke-opacity=".1" stroke-width="1"',
}

# `:root` is the SVG only where it is a document of its own; inside a page it inherits its colour.
_STYLE = (
    "<style>svg.sparkdml-lineage:root{color:#1f2328}@media(prefers-color-scheme:dark)"
    "{svg.sparkdml-lineage:root{color:#e6edf3}}</style>"
)


def document(width: float, height: float, name: str, parts: Sequence[str]) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="sparkdml-lineage" role="img" '
        f'aria-label="{escape(name)}" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" style="max-width:100%;height:auto" fill="none" '
        "font-family=\"system-ui,-apple-system,'Segoe UI',sans-serif\">"
        f"{_STYLE}{''.join(parts)}</svg>"
    )


def group(tooltip: Sequence[str], *parts: str) -> str:
    return f"<g>{_title(tooltip)}{''.join(parts)}</g>"


def text(
    x: float,
    y: float,
    words: str,
    pixels: int,
    *,
    weight: int = 400,
    anchor: str = "start",
    colour: str = INK,
    faded: bool = False,
) -> str:
    if not words:
        return ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{pixels}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour}" fill-opacity="{0.68 if faded else 1}">'
        f"{escape(words)}</text>"
    )


def text_width(words: str, pixels: int) -> float:
    """An estimate, rather too much than too little, since fonts differ."""
    return 0.56 * pixels * len(words)


def path(way: str, stroke: str) -> str:
    return f'<path d="{way}" {_STROKES[stroke]}/>' if way else ""


def line_around(begin: float, end: float, y: float, holes: Sequence[tuple[float, float]]) -> str:
    """The path of a horizontal line with holes.

    The background is unknown, so a mark can't cover the line: the line has a hole there.
    """
    way, x = [], begin
    for left, right in sorted(holes):
        if min(left, end) > x:
            way.append(f"M{x:.1f} {y:g}H{min(left, end):.1f}")
        x = max(x, right)
    if x < end:
        way.append(f"M{x:.1f} {y:g}H{end:.1f}")
    return "".join(way)


def mark(
    shape: str, begin: float, end: float, y: float, r: float, colour: str, tooltip: Sequence[str]
) -> str:
    """A mark on a lane. One mark from `begin` to `end` stands for many checkpoints."""
    title = _title(tooltip)
    if shape in ("failed", "running"):
        way = (
            f"M{begin - r:.1f} {y - r:.1f}l{2 * r:g} {2 * r:g}m0 {-2 * r:g}l{-2 * r:g} {2 * r:g}"
            if shape == "failed"
            else f"M{begin - r:.1f} {y - r:.1f}l{2 * r:g} {r:g}l{-2 * r:g} {r:g}z"
        )
        round_ends = 'stroke-linecap="round" stroke-linejoin="round"'
        return f'<path d="{way}" stroke="{colour}" stroke-width="2" {round_ends}>{title}</path>'
    # Hollow marks are almost transparent inside, so that their tooltips show there too.
    hollow = f'stroke="{colour}" stroke-width="1.6" fill="{colour}" fill-opacity=".01"'
    inside = r - 0.8
    ring = _box(begin, end, y=y, r=inside, corner=inside, paint=hollow)
    shapes = {
        "checkpoint": _box(begin, end, y=y, r=r, corner=r, paint=f'fill="{colour}"'),
        "pruned": ring,
        "root": ring + _box(begin, end, y=y, r=r * 0.42, corner=r, paint=f'fill="{colour}"'),
        "final": _box(begin, end, y=y, r=r, corner=1.5, paint=f'fill="{colour}"'),
    }
    return f"<g>{title}{shapes[shape]}</g>"


def _box(begin: float, end: float, y: float, r: float, corner: float, paint: str) -> str:
    return (
        f'<rect x="{begin - r:.1f}" y="{y - r:.1f}" width="{end - begin + 2 * r:.1f}" '
        f'height="{2 * r:.1f}" rx="{corner:g}" {paint}/>'
    )


def _title(lines: Sequence[str]) -> str:
    return f"<title>{escape(chr(10).join(lines))}</title>" if lines else ""
