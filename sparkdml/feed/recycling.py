"""Aligned memory for batches, used again once nothing holds the batch any more.

A fresh array of a batch's size comes from the kernel page by page, which takes three times as long
as filling it. Arrays and the tensors that view them hold references, so the count of references
says when an array is free.

All of it is aligned: matrix products choose their instructions by the alignment of their input, and
their last bits with them. A run that is resumed must not depend on where its batches happen to lie.

Runs in workers; a Recycler belongs to one thread.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

ALIGNMENT_BYTES = 64  # of torch's own memory
KEPT = 4  # the batch in use, the one before it in the caller's hands, and some that lie ahead
_FREE = 3  # references to an array that only we hold: the list's, the loop's, the call's


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
    return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype).numpy()


def is_aligned(array: np.ndarray) -> bool:
    address: int = array.__array_interface__["data"][0]
    return not address % ALIGNMENT_BYTES


class Recycler:
    """Arrays of one shape and type at a time."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
        """An aligned array with any content, which nothing else holds."""
        if self._arrays and (self._arrays[0].shape != shape or self._arrays[0].dtype != dtype):
            return aligned_empty(shape, dtype)  # the last, short batch of an epoch
        for array in self._arrays:
            if sys.getrefcount(array) <= _FREE:
                return array
        made = aligned_empty(shape, dtype)
        if len(self._arrays) < KEPT:
            self._arrays.append(made)
        return made

    def aligned(self, array: np.ndarray) -> np.ndarray:
        """The array itself, or a copy that is aligned."""
        if is_aligned(array):
            return array
        copy = self.array(array.shape, array.dtype)
        np.copyto(copy, array)
        return copy
