"""Filters a client's updates: significant ones are sent, the rest is held back for each table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from sparkdml.parameter_server.client.cutting import add_up_rows, check_shape
from sparkdml.parameter_server.client.read_cache import Seen
from sparkdml.parameter_server.config import ServerConfig
from sparkdml.parameter_server.consistency import ASP
from sparkdml.parameter_server.filters import Filter, Residual, Significant
from sparkdml.parameter_server.optimizers import Updater
from sparkdml.parameter_server.partition import Indexes, Table


def filter_of(config: ServerConfig) -> Callable[[int], Filter] | None:
    """The filter at each clock, or None where everything is sent."""
    consistency, chosen = config.consistency, config.filter
    if isinstance(consistency, ASP):
        return lambda clock: Significant(consistency.threshold(clock))
    return None if chosen is None else lambda clock: chosen


class UpdateFilter:
    def __init__(self, filter_at: Callable[[int], Filter]) -> None:
        self._filter_at = filter_at
        self._held: dict[int, Residual] = {}

    def sift(
        self,
        table: Table,
        value: Tensor,
        rows: Indexes | None,
        updater: Updater,
        weight: float,
        clock: int,
        seen: Seen | None,
    ) -> tuple[Indexes, Tensor]:
        """The rows to send now, ascending, with all that was held back of them."""
        if rows is None:
            check_shape(table, value)
            rows, matrix = np.arange(table.num_rows), table.matrix(value)
        else:
            rows, matrix = add_up_rows(table, value, rows)
        held = self._held.get(table.number)
        if held is None:
            held = self._held[table.number] = Residual(table.width, table.dtype)
        held.add(rows, matrix)
        # The update's approximate effect on the values: a gradient is divided for a small step.
        scale = 1.0 if updater.additive else getattr(updater, "lr", 1.0) / (weight or 1.0)
        values = None if seen is None else seen.values_of(held.rows)
        return held.take(self._filter_at(clock).choose(held.sums * scale, values))
