"""The plan of a feed: what a worker must know to read its rows, and the form in which rows come in.

The driver makes a FeedPlan, on the caller's thread and before any job, and checks what the schema
and the settings show. It is immutable and is shipped to every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.columns.base import Column
from sparkdml.feed.columns.schema import describe_columns, describe_inputs
from sparkdml.feed.order import Ints
from sparkdml.feed.ragged import Collate, RaggedArray
from sparkdml.feed.strata import Strata, check_stratify

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Arrays = dict[str, np.ndarray | RaggedArray]
Preprocess = Callable[[pa.RecordBatch], Mapping[str, Any]]
Augment = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Chunk:
    """Some rows on their way in: as arrays, with the hashes that place them."""

    columns: Arrays
    hashes: Ints
    held_out: np.ndarray | None = None  # which rows are known to be for validation
    draws: np.ndarray | None = None  # of the sampling column: how often, in proportion


@dataclass(frozen=True)
class FeedPlan:
    """Everything that a worker needs to read its rows."""

    columns: tuple[Column, ...]  # that become tensors as they are
    seed: int = 0
    validation: float | str | None = None  # a fraction of the rows, or a boolean column
    max_window_rows: int = 1 << 20  # 8 bytes a row for the permutation, three times while sorting
    max_window_bytes: int = 256 << 20  # of the page cache, which a window should fit
    inputs: tuple[Column, ...] = ()  # that preprocess is given
    preprocess: Preprocess | None = None  # once a row, before the spool
    collate: Collate | None = None  # for each batch, in training and inference
    augment: Augment | None = None  # for each batch that is trained on
    floating: str | None = None  # the floating-point type of what preprocess returns
    required: tuple[str, ...] = ()  # columns that every batch must have
    sampling: str | None = None  # a column: how often a row is drawn, in proportion
    stratify: str | None = None  # a column: the fraction is held out within each of its values
    strata: Strata | None = None  # what the driver found out about them
    drop_last: bool = False
    check_finite: bool = False

    @property
    def reads_all_first(self) -> bool:
        """Whether every row must have been read before the first batch is handed out.

        What only the user's function or a look at every number can tell must be known before the
        first step, and how often a row is drawn depends on the weights of all the others.
        """
        return self.preprocess is not None or self.check_finite or self.sampling is not None

    def known(self, names: Sequence[str]) -> tuple[Column, ...]:
        """Those of these columns that the DataFrame has; others are made of them."""
        columns = {column.name: column for column in self.columns}
        return tuple(columns[name] for name in names if name in columns)


def is_validation(hashes: Ints, fraction: float) -> np.ndarray:
    """Which rows a fraction holds out: decided by the low bits, which no shard depends on."""
    return (hashes & 0xFFFFFF) < round(fraction * (1 << 24))


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
