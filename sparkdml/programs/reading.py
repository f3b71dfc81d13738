"""A worker's rows of a DataFrame as whole arrays, for programs that go through them many times."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkdml.errors import ParameterError
from sparkdml.runtime.context import Context

ROWS_AT_ONCE = 1 << 16


def read_columns(ctx: Context, *names: str) -> list[NDArray[Any]]:
    """These columns of this worker's rows, in memory; empty ones where it has no row."""
    kinds = {column.name: column.dtype for column in ctx.data.plan.columns}
    for name in names:
        if name not in kinds:
            raise ParameterError("names", name, f"columns of the data ({', '.join(kinds)})")
    parts: dict[str, list[NDArray[Any]]] = {
        name: [np.empty(0, dtype=kinds[name])] for name in names
    }
    for batch in ctx.feed(ROWS_AT_ONCE, shuffle=False):
        for name in names:
            array = batch[name].cpu().numpy()
            if array.ndim > 1 and parts[name][0].ndim == 1:
                parts[name][0] = np.empty((0, *array.shape[1:]), dtype=kinds[name])
            parts[name].append(array.copy())  # the feed uses its buffers again
    return [np.concatenate(parts[name]) for name in names]
