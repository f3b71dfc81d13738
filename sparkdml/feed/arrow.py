"""Spark's Arrow batches as columns that become tensors: every row is checked on its way in.

For training they come as chunks, on the worker's thread that reads the stream; for `transform` and
elsewhere outside of training as a batch for the model, by the same code, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.feed.collate import Collator
from sparkdml.feed.columns.base import first_null, show_row
from sparkdml.feed.columns.kinds import ScalarColumn
from sparkdml.feed.order import Ints
from sparkdml.feed.plan import Arrays, Chunk, FeedPlan
from sparkdml.feed.preprocess import Preprocessor
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


def prepare(plan: FeedPlan, batch: pa.RecordBatch) -> Batch:
    """The rows as training sees them: preprocessed and collated, but not augmented.

    Columns of the plan that the rows don't have (a label, when it is predicted) are left out.
    """
    if not batch.num_rows:
        return Batch.empty()
    preprocessor = None if plan.preprocess is None else Preprocessor(plan)
    return Collator(plan)(read_columns(plan, batch, preprocessor))


def read_columns(
    plan: FeedPlan, batch: pa.RecordBatch, preprocessor: Preprocessor | None
) -> Arrays:
    """The columns that become tensors: those of the DataFrame, and over them what preprocess made.

    A column that preprocess returns is not looked at otherwise: it may have nulls and any length.
    """
    made: Arrays = {} if preprocessor is None else preprocessor(batch)
    names = batch.schema.names
    passed = {
        column.name: column.read(batch.column(column.name), batch)
        for column in plan.columns
        if column.name in names and column.name not in made
    }
    return {**passed, **made}
