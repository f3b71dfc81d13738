"""How a fitted model reads the rows of a DataFrame: as in training. Driver only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdml.errors import DataError
from sparkdml.feed.columns.base import Column
from sparkdml.feed.plan import FeedPlan, FeedWishes, plan_feed
from sparkdml.params import PredictionParams

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def plan_reading(
    params: PredictionParams,
    schema: StructType,
    trained: tuple[Column, ...],
    floating: str,
    with_targets: bool,
    is_supervised: bool,
) -> FeedPlan:
    """Return the plan for this schema; a DataError if it differs from the training data's."""
    known = {field.name for field in schema.fields}
    inputs = params.value("inputCols")
    if inputs is not None and not with_targets:
        # A label that preprocess was given in training does not exist in prediction.
        targets = (params.value("labelCol"), params.value("weightCol"))
        inputs = [name for name in inputs if name in known or name not in targets]
    reads_label = with_targets and (is_supervised or params.isSet("labelCol"))
    plan = plan_feed(
        schema,
        FeedWishes(
            features=params.feature_columns(),
            label=params.value("labelCol") if reads_label else None,
            weight=params.value("weightCol") if with_targets else None,
            is_step=not is_supervised or callable(params.value("predict")),
            floating=floating,
            preprocess=params.value("preprocess"),
            inputs=inputs,
            collate=params.value("collate"),
        ),
    )
    _check_same(plan, params.feature_columns(), trained)
    return plan


def plan_inputs(
    params: PredictionParams,
    features: tuple[Column, ...],
    inputs: tuple[Column, ...],
    floating: str,
) -> FeedPlan:
    """Return the plan without a schema: the columns of the training data, without its targets."""
    targets = (params.value("labelCol"), params.value("weightCol"))
    return FeedPlan(
        columns=features,
        inputs=tuple(column for column in inputs if column.name not in targets),
        preprocess=params.value("preprocess"),
        collate=params.value("collate"),
        floating=floating,
    )


def _check_same(plan: FeedPlan, names: list[str], trained: tuple[Column, ...]) -> None:
    found = {column.name: column for column in plan.columns}
    if len(trained) != len(names) or any(name not in found for name in names):
        return  # preprocess and collate make them, and check their own inputs
    for name, before in zip(names, trained, strict=True):
        now = found[name]
        if now.is_floating != before.is_floating or now.depth != before.depth:
            raise DataError(f"column {name!r} is {now}, but the model was trained on {before}")
