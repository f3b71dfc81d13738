"""A vector on the servers, read and added to as a whole: Multiverso's ArrayTable."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sparkdml.errors import ParameterError
from sparkdml.kvstore.pending import Pending
from sparkdml.kvstore.store import KVStore
from sparkdml.server.base import Ticket


class ArrayTable:
    """`size` floats under one key, 0 at first; what is pushed is added."""

    def __init__(self, store: KVStore, name: str, size: int) -> None:
        if size < 1:
            raise ParameterError("size", size, "at least 1")
        self.name, self.size = name, size
        self._store = store
        store.init(name, torch.zeros(size))

    def get(self) -> NDArray[np.float32]:
        return self.get_async().wait()

    def get_async(self) -> Ticket[NDArray[np.float32]]:
        return Pending(self._store.pull_async(self.name))

    def add(self, delta: NDArray[np.floating]) -> None:
        """Returns when the servers have it."""
        self.add_async(delta).wait()

    def add_async(self, delta: NDArray[np.floating]) -> Ticket[None]:
        if np.shape(delta) != (self.size,):
            raise ParameterError("delta", np.shape(delta), f"of the shape ({self.size},)")
        return self._store.push(self.name, torch.tensor(delta, dtype=torch.float32))
