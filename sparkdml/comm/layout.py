"""A tensor's dtype and shape as integers that are sent ahead of it, and its content as words.

Backends differ in the dtypes that they move, and their gathers need sizes in advance. So content is
sent as words of the tensor's item size, and its dtype and shape as a fixed number of integers. If
callers pass the lengths (`known_layouts`), nothing is sent ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparkdml.errors import ParameterError

MAX_DIMENSIONS = 8
LAYOUT_LENGTH = 2 + MAX_DIMENSIONS

# A dtype is sent as its index in this list: append, never reorder.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Two-byte words are sent as float16, since not every backend moves int16; no arithmetic is done.
_WORDS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True)
class Layout:
    """The dtype and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Layout:
        return cls(_DTYPES[numbers[0]], tuple(numbers[2 : 2 + numbers[1]]))

    def encode(self) -> list[int]:
        if self.dtype not in _DTYPES:
            raise ParameterError("tensor.dtype", self.dtype, "a plain numeric dtype")
        if len(self.shape) > MAX_DIMENSIONS:
            allowed = f"of at most {MAX_DIMENSIONS} dimensions"
            raise ParameterError("tensor.shape", self.shape, allowed, "Flatten some of them.")
        padding = [0] * (MAX_DIMENSIONS - len(self.shape))
        return [_DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding]

    @property
    def num_words(self) -> int:
        words_per_item = 2 if self.dtype.itemsize == 16 else 1
        return math.prod(self.shape) * words_per_item

    def from_words(self, words: Tensor) -> Tensor:
        return words.view(self.dtype).view(self.shape)


def to_words(tensor: Tensor) -> Tensor:
    """Return the content as a flat tensor of words; shares memory unless `in_memory` copies."""
    plain = in_memory(tensor.detach())
    flat = plain.as_strided((plain.numel(),), (1,))  # `view` would keep any stride of a single item
    return flat.view(_WORDS[plain.dtype.itemsize])


def in_memory(tensor: Tensor) -> Tensor:
    """Return the tensor if its memory is its content, item after item; otherwise a copy.

    torch conjugates and negates lazily, by a flag that `contiguous` keeps.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def check_alike(layouts: Sequence[Layout]) -> None:
    """Check that all ranks' tensors have the same dtype and shape but for the first dimension."""
    first = layouts[0]
    for rank, layout in enumerate(layouts):
        if (
            layout.dtype != first.dtype
            or len(layout.shape) != len(first.shape)
            or layout.shape[1:] != first.shape[1:]
        ):
            raise ParameterError(
                "tensor",
                f"{layout.dtype} {layout.shape} on rank {rank} and "
                f"{first.dtype} {first.shape} on rank 0",
                "equal on all ranks but for the first dimension",
            )


def known_layouts(own: Tensor, lengths: Sequence[int], rank: int, size: int) -> list[Layout]:
    """Return all ranks' layouts: this rank's own, with the first dimension from `lengths`."""
    if len(lengths) != size or any(length < 0 for length in lengths):
        raise ParameterError("lengths", list(lengths), f"one length for each of the {size} ranks")
    layout = Layout.of(own)
    if not layout.shape:
        allowed = "None for tensors without dimensions"
        raise ParameterError("lengths", list(lengths), allowed, "Flatten them with view(1).")
    if lengths[rank] != layout.shape[0]:
        raise ParameterError(
            f"lengths[{rank}]",
            lengths[rank],
            f"{layout.shape[0]}, the first dimension of this rank's own tensor",
            "Every rank must pass the same lengths; if they depend on its data, pass None.",
        )
    return [Layout(layout.dtype, (length, *layout.shape[1:])) for length in lengths]


def check_arrived(words: Tensor, layouts: Sequence[Layout]) -> None:
    """Check the received size, which some backends report; others have failed, or can't tell."""
    expected = sum(layout.num_words for layout in layouts)
    if words.numel() != expected:
        raise ParameterError(
            "lengths",
            [layout.shape[0] for layout in layouts],
            f"those of the ranks' tensors: expected {expected} words, received {words.numel()}",
        )
