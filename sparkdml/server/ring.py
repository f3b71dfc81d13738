"""Who serves which key: consistent hashing with virtual nodes (Karger et al. 1997).

Each server stands at many points of a circle of 64-bit numbers; a key belongs to the first server
at or after its own point, and its replicas to the next ones that are different. So a server that
comes or goes moves only its own share of the keys, and that spread over all others. Pure: the same
servers give the same ring in every process.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable

VIRTUAL_NODES = 64


def point_of(text: str) -> int:
    """Where a text stands on the circle. Python's own hash() differs from process to process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Ring:
    """A fixed set of servers, each known by its seat (0, 1, 2, …)."""

    def __init__(self, seats: Iterable[int], virtual_nodes: int = VIRTUAL_NODES) -> None:
        self.seats = tuple(sorted(set(seats)))
        marks = sorted(
            (point_of(f"server {seat} mark {mark}"), seat)
            for seat in self.seats
            for mark in range(virtual_nodes)
        )
        self._points = [point for point, _ in marks]
        self._owners = [seat for _, seat in marks]

    def owners(self, point: int, count: int) -> tuple[int, ...]:
        """The seats that hold a key: who serves it first, then its replicas in order."""
        found: list[int] = []
        wanted = min(count, len(self.seats))
        start = bisect_left(self._points, point)
        for step in range(len(self._owners)):
            if len(found) == wanted:
                break
            seat = self._owners[(start + step) % len(self._owners)]
            if seat not in found:
                found.append(seat)
        return tuple(found)
