"""Arrow rows as a batch for the model, outside of training: by the very code that training uses."""

from __future__ import annotations

import pyarrow as pa

from sparkdml.feed.batch import Batch
from sparkdml.feed.collate import Collator
from sparkdml.feed.columns import to_values
from sparkdml.feed.plan import Arrays, FeedPlan
from sparkdml.feed.preprocess import Preprocessor


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
        column.name: to_values(column, batch.column(column.name), batch)
        for column in plan.columns
        if column.name in names and column.name not in made
    }
    return {**passed, **made}
