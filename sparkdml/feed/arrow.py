"""Spark's Arrow batches as chunks for the feed: every row is checked on its way in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.feed.columns.base import first_null, show_row
from sparkdml.feed.columns.scalar import ScalarColumn
from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Chunk, FeedPlan
from sparkdml.feed.preprocess import Preprocessor, read_columns
from sparkdml.feed.strata import Splitter

HASH_COLUMN = "__sparkdml_hash"


def read_arrow(batches: Iterator[pa.RecordBatch], plan: FeedPlan) -> Iterator[Chunk]:
    preprocessor = None if plan.preprocess is None else Preprocessor(plan)
    splitter = None if plan.strata is None else Splitter(plan.strata)
    for batch in batches:
        if batch.num_rows:
            hashes = batch.column(HASH_COLUMN).to_numpy()
            yield Chunk(
                read_columns(plan, batch, preprocessor),
                hashes,
                _held_out(batch, plan, hashes, splitter),
                None if plan.sampling is None else _draws(batch, plan.sampling),
            )


def _held_out(
    batch: pa.RecordBatch, plan: FeedPlan, hashes: Ints, splitter: Splitter | None
) -> np.ndarray | None:
    if splitter is not None:
        assert plan.stratify is not None
        return splitter.held_out(batch.column(plan.stratify), hashes)
    if not isinstance(plan.validation, str):
        return None
    flags = batch.column(plan.validation)
    if flags.null_count:
        row = first_null(flags)
        raise DataError(
            f"the validation column {plan.validation!r} is null in the row {show_row(batch, row)}. "
            "Every row needs true or false: fill the column with coalesce"
        )
    return np.asarray(flags.to_numpy(zero_copy_only=False), dtype=bool)


def _draws(batch: pa.RecordBatch, name: str) -> np.ndarray:
    draws = ScalarColumn(name, "float64").read(batch.column(name), batch)
    assert isinstance(draws, np.ndarray)
    wrong = np.flatnonzero(~(np.isfinite(draws) & (draws >= 0)))
    if len(wrong):
        raise DataError(
            f"samplingCol {name!r} is {draws[wrong[0]]} in the row "
            f"{show_row(batch, int(wrong[0]))}. It must be a number of at least 0: how often the "
            "row is drawn, in proportion to the others"
        )
    return draws
