"""A binomial tree: sums travel up to rank 0, and the result comes down.

A short tensor takes 2·log2(n) messages in sequence. Every rank but the root sends S up, and S down
to each of its children: 2(n-1) · S over all ranks, most of it by the root. A long tensor is sent in
segments, so that the levels of the tree work in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdml.comm.base import PointToPoint
from sparkdml.comm.topologies.base import Combine, Sends

SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """A rank's position in a tree."""

    parent: int | None
    children: tuple[int, ...]


def binomial(rank: int, size: int) -> Place:
    """Return the position in a binomial tree: the parent lacks the rank's lowest set bit."""
    lowest = rank & -rank if rank else 1 << size.bit_length()
    distances = [1 << bit for bit in range(lowest.bit_length() - 1)]
    children = tuple(rank + distance for distance in distances if rank + distance < size)
    return Place(rank - lowest if rank else None, children)


def tree(messages: PointToPoint, rank: int, size: int, tensor: Tensor, combine: Combine) -> None:
    along_trees(messages, [(binomial(rank, size), tensor)], combine)


def num_segments(tensor: Tensor) -> int:
    return max(1, -(-tensor.nbytes // SEGMENT_BYTES))


def along_trees(
    messages: PointToPoint, trees: Sequence[tuple[Place, Tensor]], combine: Combine
) -> None:
    """Reduce each tensor along its own tree, alternating between trees by segment."""
    lanes = [_Lane(messages, tag, *each, combine) for tag, each in enumerate(trees)]
    steps = range(max(len(lane.segments) for lane in lanes))
    for step in steps:
        for lane in lanes:
            lane.go_up(step)
    for step in steps:
        for lane in lanes:
            lane.come_down(step)
    for lane in lanes:
        lane.sends.finish()


class _Lane:
    """One tensor's way up and down one tree."""

    def __init__(
        self, messages: PointToPoint, tag: int, place: Place, tensor: Tensor, combine: Combine
    ) -> None:
        self.sends = Sends(messages, tag)
        self.segments = torch.tensor_split(tensor, num_segments(tensor))
        self._place, self._combine = place, combine
        self._buffers = [torch.empty_like(self.segments[0]) for _ in place.children]

    def go_up(self, step: int) -> None:
        if step >= len(self.segments):
            return
        segment, children = self.segments[step], self._place.children
        received = [buffer[: segment.numel()] for buffer in self._buffers]
        arriving = [self.sends.receive(*each) for each in zip(received, children, strict=True)]
        # In the order of the children, not of arrival, for the same bits in every run.
        for work, message in zip(arriving, received, strict=True):
            work.wait()
            self._combine(segment, message)
        if self._place.parent is not None:
            self.sends.send(segment, self._place.parent)
        else:
            self._give_to_children(segment)

    def come_down(self, step: int) -> None:
        if step < len(self.segments) and self._place.parent is not None:
            segment = self.segments[step]
            self.sends.receive(segment, self._place.parent).wait()
            self._give_to_children(segment)

    def _give_to_children(self, segment: Tensor) -> None:
        for child in self._place.children:
            self.sends.send(segment, child)
