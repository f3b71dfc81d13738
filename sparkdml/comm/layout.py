"""What a tensor looks like, as numbers that travel ahead of it; and its content as plain words.

Backends differ in the dtypes that they move, and their gathers want to know sizes beforehand. So
content travels as words of the tensor's own item size, and its dtype and shape as a fixed number
of integers: a receiver needs to know nothing in advance.

Lengths that callers know beforehand, in place of layouts that travel ahead of the content.
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

# A dtype travels as its place in this list: append, never reorder.
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
# Two bytes travel as float16, because not every backend moves int16; no arithmetic is done on them.
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
            raise ParameterError("tensor.dtype", self.dtype, "a plain number type")
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
    """The content as a flat tensor of words; shares memory unless `in_memory` has to copy."""
    plain = in_memory(tensor.detach())
    flat = plain.as_strided((plain.numel(),), (1,))  # `view` lets a single item keep any stride
    return flat.view(_WORDS[plain.dtype.itemsize])


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory is its content, item after item; otherwise a copy.

    torch conjugates and negates by nothing but a mark, which `contiguous` keeps.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def check_alike(layouts: Sequence[Layout]) -> None:
    """Every rank's tensor has the same dtype and the same shape but for the first dimension."""
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
                "alike on all ranks but for the first dimension",
            )


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
