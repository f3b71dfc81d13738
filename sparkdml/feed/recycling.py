"""Memory for batches that is used again once nobody holds the batch any more.

A fresh array of a batch's size comes from the kernel page by page, which takes three times as long
as filling it. Arrays and the tensors that view them hold references, so the count of references
says when an array is free.
"""

from __future__ import annotations

import sys

import numpy as np

KEPT = 4  # the batch in use, the one before it in the caller's hands, and some that lie ahead
_FREE = 3  # references to an array that only we hold: the list's, the loop's, the call's


class Recycler:
    """Arrays of one shape and type at a time."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def array(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
        """An array with any content, which nobody else holds."""
        if self._arrays and (self._arrays[0].shape != shape or self._arrays[0].dtype != dtype):
            return np.empty(shape, dtype)  # the last, short batch of an epoch
        for array in self._arrays:
            if sys.getrefcount(array) <= _FREE:
                return array
        made = np.empty(shape, dtype)
        if len(self._arrays) < KEPT:
            self._arrays.append(made)
        return made
