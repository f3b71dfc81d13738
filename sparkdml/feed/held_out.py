"""The rows for validation alone, for a task that trains on none: at the driver, and in the task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sparkdml.feed.cutting import select
from sparkdml.feed.plan import Chunk, FeedPlan, is_validation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def held_out_rows(df: DataFrame, plan: FeedPlan) -> DataFrame:
    """In one partition, sorted by hash: no more rows than needed, where Spark can tell which."""
    from pyspark.sql import functions as F

    from sparkdml.feed.arrow import HASH_COLUMN
    from sparkdml.feed.sharding import hashed, is_held_out, quoted

    rows = hashed(df, plan)
    if plan.strata is None and isinstance(plan.validation, float):
        rows = rows.filter(is_held_out(plan.validation))
    elif isinstance(plan.validation, str):
        flag = F.col(quoted(plan.validation))
        rows = rows.filter(flag | flag.isNull())  # a null is refused where the row can be shown
    return rows.repartition(1).sortWithinPartitions(HASH_COLUMN)


def only_held_out(chunks: Iterator[Chunk], plan: FeedPlan) -> Iterator[Chunk]:
    """Of what came of Spark: the workers train on the rest."""
    for chunk in chunks:
        flags = chunk.held_out
        if flags is None:
            assert isinstance(plan.validation, float), "rows are held out by fraction or column"
            flags = is_validation(chunk.hashes, plan.validation)
        if flags.any():
            kept = int(np.count_nonzero(flags))
            columns, hashes = select(chunk.columns, flags), chunk.hashes[flags]
            yield Chunk(columns, hashes, np.ones(kept, dtype=bool))
