"""A pull under way whose result is wanted as an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparkdml.server.base import Ticket


class Pending:
    """`wait` gives a numpy array."""

    def __init__(self, ticket: Ticket[Tensor]) -> None:
        self._ticket = ticket

    def wait(self, timeout_seconds: float | None = None) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._ticket.wait(timeout_seconds).numpy()
        return array

    @property
    def done(self) -> bool:
        return self._ticket.done
