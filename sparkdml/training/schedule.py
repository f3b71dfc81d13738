"""How long to train, and on how many rows at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """As it is shipped to the workers."""

    epochs: int
    batch_size: int
    accumulate: int = 1  # batches whose gradients are added up before a step
    shuffle: bool = True
    validates: bool = False
    stop_at_step: int | None = None  # a replay ends there, in the middle of an epoch if need be
