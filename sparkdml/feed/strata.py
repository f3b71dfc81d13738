"""A validation split that is exact within each value of a column: its check, and the worker's side.

The rows of one value are ordered by a key made of their hash, and the first ones are held out: as
many as the fraction of them, to a row. The driver checks the column, and finds the last key that is
held out for each value (see validation_split.py); in a worker each row is compared with that of its
own value, on the thread that reads the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparkdml.errors import DataError, ParameterError
from sparkdml.feed.order import SHARD_BITS, Ints, occurrences

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ALLOWED = ["string", "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "date"]


def check_stratify(schema: StructType, name: str, validation: float | str | None) -> None:
    """What the schema and the settings show."""
    if not isinstance(validation, float):
        raise ParameterError(
            "stratifyCol",
            name,
            "used with validation=, a fraction",
            "A validation column says by itself which rows are held out."
            if validation
            else "Set validation, for instance to 0.1.",
        )
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if name not in kinds:
        raise DataError(f"no column {name!r} for stratifyCol=: there is {', '.join(kinds)}")
    if kinds[name] not in ALLOWED:
        raise DataError(
            f"stratifyCol {name!r} has the type {kinds[name]}; it must be one of "
            f"{', '.join(ALLOWED)}: cast it, for instance to string"
        )


def split_keys(hashes: Ints) -> npt.NDArray[np.uint64]:
    """Another order of the rows than that of their hashes: the bits of the shard come last.

    Every bit is kept, so that only rows with the same hash have the same key.
    """
    bits = hashes.view(np.uint64)
    return (bits << np.uint64(SHARD_BITS)) | (bits >> np.uint64(64 - SHARD_BITS))


@dataclass(frozen=True)
class Stratum:
    """Which rows of one value are held out: all before `key`, and `ties` of those that have it."""

    key: int
    ties: int
    num_held_out: int


@dataclass(frozen=True)
class Strata:
    """All values of the column."""

    column: str
    by_value: Mapping[Any, Stratum] = field(default_factory=dict)

    @property
    def num_held_out(self) -> int:
        return sum(stratum.num_held_out for stratum in self.by_value.values())


class Splitter:
    """Tells which rows of a worker's stream are held out; rows come in the order of their hashes.

    Rows with one hash have one content and lie together, all on one worker, so it doesn't matter
    which of them are held out, and a count is enough to hold out the right number.
    """

    def __init__(self, strata: Strata) -> None:
        self._strata = strata
        values = list(strata.by_value)
        found = list(strata.by_value.values())
        self._values = values
        self._value_set: pa.Array | None = None
        self._keys = np.array([stratum.key for stratum in found], dtype=np.uint64)
        self._ties = np.array([stratum.ties for stratum in found], dtype=np.int64)

    def held_out(self, values: pa.Array, hashes: Ints) -> np.ndarray:
        if self._value_set is None:
            self._value_set = pa.array(self._values, type=values.type)
        places = pc.index_in(values, value_set=self._value_set)
        if places.null_count:
            value = values[int(np.flatnonzero(places.is_null().to_numpy(zero_copy_only=False))[0])]
            raise DataError(
                f"stratifyCol {self._strata.column!r} has the value {value.as_py()!r}, which it "
                "did not have when the rows were counted. Rows that are not computed the same way "
                "twice can't be split: write the data out, or persist it, before training"
            )
        strata = places.to_numpy(zero_copy_only=False).astype(np.int64)
        keys = split_keys(hashes)
        held_out: np.ndarray = keys < self._keys[strata]
        tied = np.flatnonzero(keys == self._keys[strata])
        if len(tied):
            tied = tied[occurrences(strata[tied]) < self._ties[strata[tied]]]
            held_out[tied] = True
            self._ties -= np.bincount(strata[tied], minlength=len(self._ties))
        return held_out
