"""The driver's plan of a feed: what the schema and the settings show is checked here.

Runs at the driver, on the caller's thread, before any job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.columns.base import Column
from sparkdml.feed.columns.schema import describe_columns, describe_inputs
from sparkdml.feed.plan import Augment, FeedPlan, Preprocess
from sparkdml.feed.ragged import Collate
from sparkdml.feed.validation_split import check_stratify

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NUMBERS = ["tinyint", "smallint", "int", "bigint", "float", "double", "boolean"]


@dataclass(frozen=True)
class FeedWishes:
    """What the user wants to be fed, by the names of columns."""

    features: Sequence[str]
    label: str | None
    weight: str | None
    is_step: bool  # a step function reads what it likes, so no column is needed for sure
    floating: str
    seed: int = 0
    validation: float | str | None = None
    stratify: str | None = None
    sampling: str | None = None
    preprocess: Preprocess | None = None
    inputs: Sequence[str] | None = None
    collate: Collate | None = None
    augment: Augment | None = None
    drop_last: bool = False
    check_finite: bool = False


def plan_feed(schema: StructType, wishes: FeedWishes) -> FeedPlan:
    """The plan, or an error that says what is wrong with the schema or the settings."""
    _check_settings(schema, wishes)
    known = {field.name for field in schema.fields}
    named = [*wishes.features, wishes.label, wishes.weight]
    wanted = list(dict.fromkeys(name for name in named if name is not None))
    there = [name for name in wanted if name in known]
    inputs: list[Column] = []
    if wishes.preprocess is not None:
        inputs = describe_inputs(schema, there if wishes.inputs is None else list(wishes.inputs))
        columns = [column for column in describe_inputs(schema, there) if column.is_fed]
        if not inputs:
            raise ParameterError(
                "inputCols",
                None,
                "a list of columns for preprocess",
                f"The DataFrame has none of {', '.join(wanted)}, which it would be given.",
            )
    elif wishes.collate is not None and there:
        columns = describe_columns(schema, there)  # collate may make the others of them
    else:
        columns = describe_columns(schema, wanted)
    return FeedPlan(
        columns=tuple(_as_fed(column, wishes) for column in columns),
        seed=wishes.seed,
        validation=wishes.validation,
        inputs=tuple(inputs),
        preprocess=wishes.preprocess,
        collate=wishes.collate,
        augment=wishes.augment,
        floating=wishes.floating,
        required=() if wishes.is_step else tuple(wanted),
        sampling=wishes.sampling,
        stratify=wishes.stratify,
        drop_last=wishes.drop_last,
        check_finite=wishes.check_finite,
    )


def _as_fed(column: Column, wishes: FeedWishes) -> Column:
    cast = column.cast(wishes.floating)
    return cast if wishes.collate is None else cast.for_collate()


def _check_settings(schema: StructType, wishes: FeedWishes) -> None:
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if wishes.inputs is not None and wishes.preprocess is None:
        raise ParameterError("inputCols", list(wishes.inputs), "unset without preprocess=")
    if isinstance(wishes.validation, str):
        name = wishes.validation
        if name not in kinds:
            raise DataError(f"no column {name!r} for validation=: there is {', '.join(kinds)}")
        if kinds[name] != "boolean":
            raise DataError(
                f"the validation column {name!r} is {kinds[name]}, not boolean: cast it"
            )
    if wishes.stratify is not None:
        check_stratify(schema, wishes.stratify, wishes.validation)
    if wishes.sampling is not None:
        if wishes.sampling not in kinds:
            raise DataError(
                f"no column {wishes.sampling!r} for samplingCol=: there is {', '.join(kinds)}"
            )
        if kinds[wishes.sampling] not in NUMBERS:
            raise DataError(
                f"samplingCol {wishes.sampling!r} is {kinds[wishes.sampling]}, not a number: cast "
                "it to double"
            )
