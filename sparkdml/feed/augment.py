"""The user's `augment`: another view of a batch each time it is trained on, and yet reproducible.

It runs on the training's own thread and on its device, with the random states of torch, numpy and
Python seeded by (seed, epoch, rank, rows of the epoch before this batch), and put back afterwards:
a resumed run sees the same, and the model's own random numbers don't depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from sparkdml.errors import DataError
from sparkdml.feed.batch import Batch
from sparkdml.feed.collate import checked
from sparkdml.feed.plan import Augment
from sparkdml.runtime.randomness import random_state, restore_random_state, seed_everything


def augmented(
    batches: Iterator[Batch],
    augment: Augment,
    key: tuple[int, int, int],
    rows_before: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Each batch as `augment` makes it; `key` is (seed, epoch, rank)."""
    for batch in batches:
        words = np.random.SeedSequence([*key, rows_before]).generate_state(1, np.uint64)
        rows_before += batch.num_rows
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
