"""Draws docs/images/strategies/*.svg, a small picture of each: `python scripts/draw_strategies.py`.

The pictures take the page's own colour for text and follow its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from sparkdml.comm.topologies.classic.double_tree import places as double_tree_places
from sparkdml.comm.topologies.tree import binomial

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "strategies"
WIDTH, HEIGHT = 300, 170
BLUE, GREEN, ORANGE, GREY = "#3b82f6", "#2f9e6e", "#d97706", "#8a919b"
COLOURS = {"blue": BLUE, "green": GREEN, "orange": ORANGE, "grey": GREY}
SIZE = 26  # of a rank's box

Parts = list[str]


def rank(x: float, y: float, name: str, colour: str = BLUE) -> str:
    half = SIZE / 2
    return (
        f'<rect x="{x - half:g}" y="{y - half:g}" width="{SIZE}" height="{SIZE}" rx="6" '
        f'stroke="{colour}" fill="{colour}" fill-opacity=".14"/>' + words(x, y + 4, name, "t m")
    )


def words(x: float, y: float, said: str, style: str = "p") -> str:
    return f'<text class="{style}" x="{x:g}" y="{y:g}">{said}</text>'


def box(x: float, y: float, width: float, height: float, colour: str = GREY) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" stroke="{colour}" '
        f'fill="{colour}" fill-opacity=".08"/>'
    )


def bar(x: float, y: float, width: float, colour: str, height: float = 12) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{colour}" '
        'fill-opacity=".75"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = "blue", bend: float = 0) -> str:
    """From edge to edge of the boxes at both ends; `bend` pushes the middle to the side."""
    length = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    gap = SIZE / 2 + 4
    x1, y1, x2, y2 = x1 + dx * gap, y1 + dy * gap, x2 - dx * gap, y2 - dy * gap
    middle_x, middle_y = (x1 + x2) / 2 - dy * bend, (y1 + y2) / 2 + dx * bend
    return line(f"M{x1:.1f} {y1:.1f}Q{middle_x:.1f} {middle_y:.1f} {x2:.1f} {y2:.1f}", colour)


def line(way: str, colour: str = "blue", head: bool = True, dashed: bool = False) -> str:
    end = f' marker-end="url(#{colour})"' if head else ""
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    return f'<path d="{way}" stroke="{COLOURS[colour]}" stroke-width="1.6"{dashes}{end}/>'


def circle_of(count: int, radius: float = 55) -> list[tuple[float, float]]:
    turns = [2 * math.pi * number / count - math.pi / 2 for number in range(count)]
    return [(150 + 1.5 * radius * math.cos(t), 84 + radius * math.sin(t)) for t in turns]


def ring() -> Parts:
    places = circle_of(4)
    ways = [arrow(*places[n], *places[(n + 1) % 4], bend=-14) for n in range(4)]
    ranks = [rank(*place, str(n)) for n, place in enumerate(places)]
    return [
        *ways,
        *ranks,
        words(150, 80, "S/n at a time", "p m"),
        words(150, 95, "2(n-1) steps", "p m"),
    ]


def tree() -> Parts:
    places = {0: (90, 26), 1: (40, 70), 2: (110, 70), 4: (205, 70)}
    places |= {3: (76, 112), 5: (172, 112), 6: (240, 112), 7: (280, 152)}
    parts = []
    for n, place in places.items():
        parent = binomial(n, len(places)).parent
        if parent is not None:
            parts.append(arrow(*place, *places[parent], bend=5))
            parts.append(arrow(*places[parent], *place, "green", bend=5))
    return [
        *parts,
        *(rank(*place, str(n)) for n, place in places.items()),
        words(20, 146, "blue: sums up"),
        words(20, 162, "green: result down"),
    ]


def double_tree() -> Parts:
    count = 6
    both = [double_tree_places(n, count) for n in range(count)]
    parts = []
    for which, colour, half in ((0, "blue", "first half"), (1, "green", "second half")):
        parents = [both[n][which].parent for n in range(count)]
        # From left to right in the order of the ranks, which is mirrored in the second tree.
        order = range(count) if which == 0 else reversed(range(count))
        across = {n: 18 + 150 * which + 23 * place for place, n in enumerate(order)}
        places = {n: (across[n], 40 + 44 * depth(n, parents)) for n in range(count)}
        for n, parent in enumerate(parents):
            if parent is not None:
                parts.append(arrow(*places[n], *places[parent], colour))
        parts += [rank(*place, str(n), COLOURS[colour]) for n, place in places.items()]
        parts.append(words(75 + 150 * which, 18, f"{half} of S", "p m"))
    return parts


def depth(n: int, parents: list[int | None]) -> int:
    parent = parents[n]
    return 0 if parent is None else 1 + depth(parent, parents)


def halving_doubling() -> Parts:
    parts = []
    for y, distance, said in (
        (46, 1, "S/2 with the neighbour"),
        (112, 2, "S/4 at distance 2, and back"),
    ):
        places = [(55 + 63 * n, y) for n in range(4)]
        for n in range(4):
            if not n & distance:
                one, other = places[n], places[n + distance]
                if distance == 1:
                    parts += [arrow(*one, *other, bend=-10), arrow(*other, *one, "green", bend=-10)]
                    continue
                y0, y1 = (y - 16, y - 44) if n == 0 else (y + 16, y + 44)
                parts.append(line(f"M{one[0]} {y0}Q{(one[0] + other[0]) / 2} {y1} {other[0]} {y0}"))
        parts += [rank(*place, str(n)) for n, place in enumerate(places)]
        parts.append(words(150, y - 26 if distance == 1 else y + 50, said, "p m"))
    return parts


def shared_memory() -> Parts:
    parts = [box(20, 14, 260, 142), words(32, 32, "one host"), box(50, 96, 200, 34, GREEN)]
    parts.append(words(150, 150, "each adds one n-th of all, in rank order", "p m"))
    for n in range(4):
        x = 75 + 50 * n
        parts += [rank(x, 58, str(n)), line(f"M{x - 4} 75V93"), line(f"M{x + 4} 93V75", "green")]
        parts.append(bar(x - 17, 104, 34, BLUE, 18))
    return parts


def hierarchical() -> Parts:
    parts = []
    for x in (16, 160):
        parts += [box(x, 30, 124, 118), words(x + 10, 48, "host")]
        places = [(x + 32, 120), (x + 92, 120)]
        leader = (x + 62, 74)
        parts += [arrow(*place, *leader) for place in places]
        parts += [rank(*place, str(n + 1 + (x > 100) * 3)) for n, place in enumerate(places)]
        parts.append(rank(*leader, str((x > 100) * 3), ORANGE))
    parts += [arrow(78, 74, 222, 74, "orange"), arrow(222, 74, 78, 74, "orange")]
    return [*parts, words(150, 18, "memory inside, messages between leaders", "p m")]


def half() -> Parts:
    parts = [rank(30, 80, "0"), rank(270, 80, "1")]
    parts += [bar(60 + 22 * n, 48, 18, BLUE) for n in range(8)]
    parts += [bar(60 + 22 * n, 100, 9, GREEN) for n in range(8)]
    return [
        *parts,
        line("M150 64V96", "grey"),
        words(60, 40, "float32"),
        words(60, 130, "16 bits: half the bytes"),
        line("M240 106H253", "green"),
    ]


def one_bit() -> Parts:
    parts = [rank(30, 84, "0"), rank(270, 84, "1")]
    heights = [14, -9, 22, -20, 6, -14, 18, -5]
    parts += [bar(62 + 22 * n, 46 - max(h, 0), 14, BLUE, abs(h)) for n, h in enumerate(heights)]
    parts += [words(69 + 22 * n, 100, "+" if h > 0 else "-", "t m") for n, h in enumerate(heights)]
    parts.append(line("M150 70V86", "grey"))
    parts.append(words(62, 118, "a bit each, two means a column"))
    return [
        *parts,
        line("M236 96H253", "green"),
        line("M30 102V146H150V128", "orange"),
        words(158, 148, "errors become residuals"),
    ]


def top_k() -> Parts:
    heights = [4, 26, 6, 3, 30, 5, 7, 2, 22, 4]
    parts = [rank(26, 84, "0"), rank(274, 84, "1")]
    for n, height in enumerate(heights):
        parts.append(bar(58 + 19 * n, 76 - height, 14, GREEN if height > 20 else GREY, height))
    return [
        *parts,
        words(150, 98, "(index, value) of the largest", "p m"),
        line("M230 84H256", "green"),
        line("M26 102V146H150V110", "orange"),
        words(158, 148, "the rest is kept"),
    ]


def power_sgd() -> Parts:
    parts = [box(30, 40, 90, 80, BLUE), words(75, 84, "n x m", "t m"), words(140, 86, "=", "t m")]
    parts += [box(160, 40, 18, 80, GREEN), words(184, 84, "x"), box(196, 40, 80, 18, GREEN)]
    return [
        *parts,
        words(169, 136, "n x r", "p m"),
        words(236, 76, "r x m", "p m"),
        words(150, 158, "two thin allreduces; the rest is kept", "p m"),
    ]


def lanes(rows: list[list[tuple[float, float, str]]], meetings: tuple[float, ...] = ()) -> Parts:
    """Time runs to the right: bars of (from, to, colour) for each rank."""
    parts = []
    for n, row in enumerate(rows):
        y = 36 + 30 * n
        parts.append(words(12, y + 10, f"rank {n}"))
        parts += [bar(60 + start, y, stop - start - 2, colour) for start, stop, colour in row]
    height = 36 + 30 * len(rows)
    parts += [line(f"M{60 + at:g} 28V{height - 8}", "green", head=False) for at in meetings]
    return parts


def local_sgd() -> Parts:
    steps = [(0, 24, BLUE), (24, 48, BLUE), (48, 72, BLUE), (72, 96, BLUE)]
    row = steps + [(a + 108, b + 108, c) for a, b, c in steps]
    return [
        *lanes([row] * 3, (101, 209)),
        words(161, 20, "mean of the models", "p m"),
        words(150, 146, "H steps of one's own, then an allreduce", "p m"),
    ]


def momentum(said: str, note: str) -> Parts:
    return [
        rank(50, 120, "x", GREY),
        arrow(50, 120, 150, 100),
        rank(150, 100, "mean"[:1], BLUE),
        line("M168 96L236 64", "orange"),
        rank(254, 56, "x'", GREEN),
        line("M62 104Q90 50 138 84", "grey", dashed=True),
        line("M64 130Q110 150 140 112", "grey", dashed=True),
        words(96, 50, "workers' blocks", "p m"),
        words(214, 100, said),
        words(150, 158, note, "p m"),
    ]


def block_momentum() -> Parts:
    return momentum("+ momentum", "the block's update, filtered: (m) is the mean")


def slow_mo() -> Parts:
    return momentum("slow step", "momentum in units of gradients")


def easgd() -> Parts:
    parts = [rank(150, 84, "c", GREEN)]
    for n, (x, y) in enumerate([(50, 40), (250, 40), (50, 130), (250, 130)]):
        parts.append(rank(x, y, str(n)))
        dx, dy = (150 - x) / 100, (84 - y) / 46
        way = f"M{x + 18 * dx:g} {y + 8 * dy:g}"
        for k in range(1, 8):
            side = 5 if k % 2 else -5
            way += f"L{x + dx * (18 + 8.4 * k):.1f} {y + dy * (8 + 3.6 * k) + side:.1f}"
        parts.append(line(way + f"L{150 - 16 * dx:.1f} {84 - 7 * dy:.1f}", "orange", head=False))
    return [*parts, words(150, 160, "springs between each model and the centre", "p m")]


def layered_sgd() -> Parts:
    parts = []
    for x in (18, 162):
        parts.append(box(x, 62, 120, 92))
        leader = (x + 60, 36)
        for n, place in enumerate([(x + 30, 112), (x + 90, 112)]):
            parts += [arrow(*place, *leader, bend=4), arrow(*leader, *place, "green", bend=4)]
            parts.append(rank(*place, str(n + 2 * (x > 100))))
        parts.append(rank(*leader, "c", ORANGE))
        parts.append(words(x + 60, 148, "read the next batch", "p m"))
    return [
        *parts,
        arrow(78, 36, 222, 36, "orange", bend=-8),
        arrow(222, 36, 78, 36, "orange", bend=-8),
    ]


def hybrid() -> Parts:
    parts = [rank(150, 32, "ps", GREEN)]
    for group, x in enumerate((16, 160)):
        parts.append(box(x, 78, 124, 62))
        places = [(x + 30, 106), (x + 94, 106)]
        parts += [arrow(*places[0], *places[1], bend=-8), arrow(*places[1], *places[0], bend=-8)]
        first = places[1 - group]  # the one that speaks to the servers
        parts += [arrow(*first, 150, 32, "orange", bend=4), arrow(150, 32, *first, "green", bend=4)]
        names = ("10", "23")[group]
        parts += [rank(*place, name) for place, name in zip(places, names, strict=True)]
        parts.append(words(x + 62, 134, "allreduce", "p m"))
    return [*parts, words(150, 158, "groups push and pull when they are ready", "p m")]


def averaging() -> Parts:
    parts = [words(12, 20, "ordinary tasks, no gang")]
    for n in range(4):
        x = 60 + 60 * n
        parts += [rank(x, 50, str(n)), bar(x - 13, 72, 26, BLUE)]
        parts.append(arrow(x, 78, 120 if n < 2 else 180, 124))
    parts += [rank(120, 124, "+", GREY), rank(180, 124, "+", GREY)]
    return [*parts, arrow(120, 124, 180, 124, "green"), words(206, 128, "driver: mean")]


def gossip() -> Parts:
    places = circle_of(5, 54)
    parts = []
    for n in range(5):
        parts.append(arrow(*places[n], *places[(n + 1) % 5], "green", bend=6))
        parts.append(arrow(*places[(n + 1) % 5], *places[n], "green", bend=6))
    return [
        *parts,
        *(rank(*place, f"x{n}") for n, place in enumerate(places)),
        words(150, 88, "neighbours only", "p m"),
    ]


def ad_psgd() -> Parts:
    rows = [
        [(0, 40, BLUE), (40, 80, BLUE), (80, 120, BLUE), (120, 160, BLUE), (160, 200, BLUE)],
        [(0, 100, BLUE), (100, 200, BLUE)],
        [(0, 50, BLUE), (50, 100, BLUE), (100, 150, BLUE), (150, 200, BLUE)],
    ]
    links = [
        line(f"M{60 + x} {50 + 30 * a}V{64 + 30 * a}", "orange")
        for x, a in ((44, 0), (104, 1), (150, 0))
    ]
    return [*lanes(rows), *links, words(150, 146, "pairs average in the background", "p m")]


def lbfgs() -> Parts:
    parts = []
    for n in range(3):
        x = 60 + 90 * n
        parts += [rank(x, 40, str(n)), words(x, 20, "all own rows", "p m")]
        parts += [bar(x - 40, 74 + 12 * k, 80, GREY, 7) for k in range(4)]
        parts += [bar(x - 40 + 27 * n, 74 + 12 * k, 26, GREEN, 7) for k in range(4)]
    return [
        *parts,
        words(150, 138, "each holds one slice of g, s and y", "p m"),
        words(150, 156, "dots add up; all take the same step", "p m"),
    ]


def newton_cg() -> Parts:
    passes = [
        (0, 34, BLUE),
        *[(36 + 27 * n, 61 + 27 * n, ORANGE) for n in range(4)],
        (146, 180, GREEN),
    ]
    return [
        *lanes([passes] * 3, (35, 62, 89, 116, 143)),
        words(62, 20, "gradient"),
        words(128, 20, "H d, H d, ..."),
        words(212, 20, "search"),
        words(150, 146, "every bar is a pass over the rows", "p m"),
    ]


def backup_workers() -> Parts:
    rows = [
        [(0, 60, BLUE), (70, 130, BLUE), (140, 200, BLUE)],
        [(0, 66, BLUE), (70, 134, BLUE), (140, 204, BLUE)],
        [(0, 56, BLUE), (70, 128, BLUE), (140, 196, BLUE)],
        [(0, 120, GREY), (140, 220, GREY)],
    ]
    return [
        *lanes(rows, (68, 138, 208)),
        words(150, 20, "the first n - b of n count", "p m"),
        words(150, 166, "grey: dropped, its rows skipped and counted", "p m"),
    ]


def adaptive_balance() -> Parts:
    rows = [[(0, 180, BLUE)], [(0, 180, BLUE)], [(0, 180, BLUE)], [(0, 180, BLUE)]]
    parts = lanes(rows, (182,))
    parts += [
        words(150, 45 + 30 * n, f"{count} rows", "w m") for n, count in enumerate((19, 20, 20, 5))
    ]
    return [
        *parts,
        words(150, 20, "rows by measured speed, the same sum", "p m"),
        line("M250 136Q276 110 250 76", "orange"),
        words(268, 120, "move"),
    ]


def hogwild() -> Parts:
    parts = [box(40, 100, 220, 40, GREEN), words(150, 124, "parameters, no lock", "t m")]
    for n in range(4):
        x = 75 + 50 * n
        parts += [
            rank(x, 48, str(n)),
            line(f"M{x - 5} 66V96", "orange"),
            line(f"M{x + 5} 96V66", "green"),
        ]
    return parts


PICTURES: list[Callable[[], Parts]] = [
    *(ring, tree, double_tree, halving_doubling, shared_memory, hierarchical),
    *(half, one_bit, top_k, power_sgd),
    *(local_sgd, block_momentum, slow_mo, easgd, hogwild),
    *(
        layered_sgd,
        hybrid,
        averaging,
        gossip,
        ad_psgd,
        backup_workers,
        adaptive_balance,
        lbfgs,
        newton_cg,
    ),
]


def document(name: str, parts: Parts, width: int = WIDTH, height: int = HEIGHT) -> str:
    heads = "".join(
        f'<marker id="{key}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/>'
        "</marker>"
        for key, colour in COLOURS.items()
    )
    style = (
        "svg.sparkdml-strategy:root{color:#1f2328}@media(prefers-color-scheme:dark)"
        "{svg.sparkdml-strategy:root{color:#e6edf3}}.t{fill:currentColor;font-weight:600}"
        ".p{fill:currentColor;fill-opacity:.75}.w{fill:#fff;font-weight:600}.m{text-anchor:middle}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sparkdml-strategy" role="img" '
        f'aria-label="{name}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'style="max-width:100%;height:auto" fill="none" font-family="system-ui,-apple-system,'
        f'\'Segoe UI\',sans-serif" font-size="11">\n<style>{style}</style>\n<defs>{heads}</defs>\n'
        f"{body}\n</svg>\n"
    )


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in PICTURES:
        name = draw.__name__.replace("_", "-")
        (FOLDER / f"{name}.svg").write_text(document(name.replace("-", " "), draw()))
    print(f"{len(PICTURES)} pictures in {FOLDER}")


if __name__ == "__main__":
    main()
