"""Who belongs together after a split."""

from __future__ import annotations

from collections.abc import Sequence


def members(colors: Sequence[int], keys: Sequence[int], rank: int) -> list[int]:
    """The ranks that gave this rank's color, ordered by key, then by rank."""
    mine = [other for other, color in enumerate(colors) if color == colors[rank]]
    return sorted(mine, key=lambda other: (keys[other], other))
