"""Lengths that callers know beforehand, in place of layouts that travel ahead of the content."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparkdml.comm.layout import Layout
from sparkdml.errors import ParameterError


def known_layouts(own: Tensor, lengths: Sequence[int], rank: int, size: int) -> list[Layout]:
    """Of what all ranks bring: as this rank's own tensor, but for the first dimension."""
    if len(lengths) != size or any(length < 0 for length in lengths):
        raise ParameterError("lengths", list(lengths), f"a length for each of the {size} ranks")
    layout = Layout.of(own)
    if not layout.shape:
        allowed = "None for tensors without dimensions"
        raise ParameterError("lengths", list(lengths), allowed, "Flatten them with view(1).")
    if lengths[rank] != layout.shape[0]:
        raise ParameterError(
            f"lengths[{rank}]",
            lengths[rank],
            f"{layout.shape[0]}, the first dimension of this rank's own tensor",
            "Every rank must work out the same lengths; where they depend on its data, give None.",
        )
    return [Layout(layout.dtype, (length, *layout.shape[1:])) for length in lengths]


def check_arrived(words: Tensor, layouts: Sequence[Layout]) -> None:
    """Some backends tell how much came; others have failed by now, or can't see it."""
    expected = sum(layout.num_words for layout in layouts)
    if words.numel() != expected:
        raise ParameterError(
            "lengths",
            [layout.shape[0] for layout in layouts],
            f"those of the ranks' tensors: {expected} words were expected and {words.numel()} came",
        )
