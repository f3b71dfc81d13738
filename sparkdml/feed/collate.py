"""From arrays to the batches that a model is given: alignment, then the user's functions.

`collate` makes tensors of columns of any length, in training and in `transform`. It runs on the
thread that makes batches, which may be ahead of the training's own.

`augment` makes another view of a batch each time it is trained on, and yet a reproducible one. It
runs on the training's own thread and on its device, with the random states of torch, numpy and
Python seeded by the seed and by which rows of the epoch these are, and put back afterwards: a
resumed run sees the same, and the model's own random numbers don't depend on it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch, Recycler
from sparkdml.feed.plan import Arrays, Augment, FeedPlan
from sparkdml.feed.ragged import Collate, Ragged, RaggedArray
from sparkdml.feed.randomness import random_state, restore_random_state, seed_everything

# Arrow's memory is read-only to numpy. Rows from the stream are handed out once and are spooled
# before, so a model that writes into its input does no harm.
warnings.filterwarnings("ignore", message="The given NumPy array is not writ")


class Collator:
    """Makes batches of what the spool, the stream or a query gives, one after the other."""

    def __init__(self, plan: FeedPlan, required: tuple[str, ...] = ()) -> None:
        self._collate = plan.collate
        self._required = required
        self._recyclers: defaultdict[str, Recycler] = defaultdict(Recycler)

    def __call__(self, arrays: Arrays) -> Batch:
        num_rows = len(next(iter(arrays.values())))
        columns: dict[str, Any] = {
            name: self._tensor(name, values) for name, values in arrays.items()
        }
        if self._collate is not None:
            columns = apply_collate(self._collate, columns, num_rows)
        if self._required:
            check_required(columns, self._required)
            self._required = ()  # batches are all alike
        return Batch(columns, num_rows)

    def _tensor(self, name: str, values: Any) -> Tensor | Ragged:
        if isinstance(values, RaggedArray):
            flat = torch.from_numpy(self._recyclers[name].aligned(values.values))
            return Ragged(flat, torch.from_numpy(values.offsets))
        return torch.from_numpy(self._recyclers[name].aligned(values))


def apply_collate(collate: Collate, columns: dict[str, Any], num_rows: int) -> dict[str, Tensor]:
    """What it returns, laid over the columns that are tensors already."""
    try:
        returned = collate(dict(columns))
    except Exception as error:
        shown = ", ".join(f"{name}: {_show(value)}" for name, value in columns.items())
        raise DataError(
            f"collate failed on a batch of {num_rows:,} rows with {shown}: "
            f"{type(error).__name__}: {error}"
        ) from error
    tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    return {**tensors, **checked(returned, num_rows, "collate")}


def checked(returned: Any, num_rows: int, parameter: str) -> Mapping[str, Tensor]:
    """What a function of the user's has made of a batch."""
    if not isinstance(returned, Mapping):
        raise DataError(f"{parameter} returned a {type(returned).__name__}, not a dict of tensors")
    for name, value in returned.items():
        if isinstance(value, Ragged):
            raise DataError(
                f"{parameter} left column {name!r} ragged; it must return a tensor for it: "
                f"{name}.pad(), or leave it out"
            )
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != num_rows:
            raise DataError(
                f"{parameter} returned {_show(value)} for column {name!r}, not a tensor whose "
                f"first dimension is the {num_rows:,} rows of the batch"
            )
    return returned


def check_required(columns: Mapping[str, Any], required: tuple[str, ...]) -> None:
    for name in required:
        if name not in columns:
            raise DataError(
                f"no column {name!r}: the DataFrame has none that can be fed, and after preprocess "
                f"and collate there is {', '.join(columns) or 'none'}. Return it there, or set "
                "featuresCol, labelCol or weightCol"
            )


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value) if isinstance(value, Ragged) else f"a {type(value).__name__}"


Place = tuple[int, int, int]  # epoch, the rows' owner, and how many of its rows are before them


class InOrder:
    """The places of one owner's rows that come one after the other."""

    def __init__(self, epoch: int, owner: int, rows_before: int) -> None:
        self._epoch, self._owner, self._rows_before = epoch, owner, rows_before

    def __call__(self, batch: Batch) -> Place:
        place = (self._epoch, self._owner, self._rows_before)
        self._rows_before += batch.num_rows
        return place


def augmented(
    batches: Iterator[Batch],
    augment: Augment,
    seed: int,
    place_of: Callable[[Batch], Place],
    device: torch.device,
) -> Iterator[Batch]:
    """Each batch as `augment` makes it; `place_of` is asked once for each, in turn."""
    for batch in batches:
        words = np.random.SeedSequence([seed, *place_of(batch)]).generate_state(1, np.uint64)
        yield _augment(batch, augment, int(words[0] >> np.uint64(1)), device)


def _augment(batch: Batch, augment: Augment, seed: int, device: torch.device) -> Batch:
    state = random_state(device)
    try:
        seed_everything(seed)
        returned = augment(dict(batch))
    except Exception as error:
        raise DataError(f"augment failed on {batch!r}: {type(error).__name__}: {error}") from error
    finally:
        restore_random_state(state, device)
    return Batch({**batch, **checked(returned, batch.num_rows, "augment")}, batch.num_rows)
