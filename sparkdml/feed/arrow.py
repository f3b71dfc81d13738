"""Spark's Arrow batches as chunks for the feed: every row is checked on its way in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.feed.columns import show_row, to_numpy
from sparkdml.feed.feed import Chunk, FeedPlan

HASH_COLUMN = "__sparkdml_hash"


def read_arrow(batches: Iterator[pa.RecordBatch], plan: FeedPlan) -> Iterator[Chunk]:
    for batch in batches:
        if batch.num_rows:
            columns = {
                column.name: to_numpy(column, batch.column(column.name), batch)
                for column in plan.columns
            }
            hashes = batch.column(HASH_COLUMN).to_numpy()
            yield Chunk(columns, hashes, _held_out(batch, plan))


def _held_out(batch: pa.RecordBatch, plan: FeedPlan) -> np.ndarray | None:
    if not isinstance(plan.validation, str):
        return None
    flags = batch.column(plan.validation)
    if flags.null_count:
        row = int(np.flatnonzero(flags.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"the validation column {plan.validation!r} is null in the row {show_row(batch, row)}. "
            "Every row needs true or false: fill the column with coalesce"
        )
    return np.asarray(flags.to_numpy(zero_copy_only=False), dtype=bool)
