"""The user's `augment`: another view of a batch each time it is trained on, and yet reproducible.

It runs on the training's own thread and on its device, with the random states of torch, numpy and
Python seeded by the seed and by which rows of the epoch these are, and put back afterwards: a
resumed run sees the same, and the model's own random numbers don't depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.feed.collate import checked
from sparkdml.feed.plan import Augment
from sparkdml.runtime.randomness import random_state, restore_random_state, seed_everything

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
