"""A copy of the state in host memory: all that the training thread pays for a checkpoint.

The memory is kept and used again: fresh pages would cost more than the copy itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparkdml.checkpoint.encoding import Tensors


class Staging:
    """Host memory for one state. It is free again when its write is done."""

    def __init__(self) -> None:
        self._buffers: Tensors = {}

    def copy(self, tensors: Tensors) -> Tensors:
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        if tensors:
            sources = [tensor.contiguous() for tensor in tensors.values()]
            torch._foreach_copy_(list(self._buffers.values()), sources, non_blocking=True)
            if any(source.is_cuda for source in sources):
                torch.cuda.synchronize()
        return self._buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            return old
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
