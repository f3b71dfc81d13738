"""The random states of a process: seeded for each rank, saved, put back.

Runs in workers, on the thread that trains.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """A stream for each rank, so that no two drop out the same units."""
    mixed = np.random.SeedSequence([seed, rank + 1, step]).generate_state(1, np.uint64)[0]
    seed_everything(int(mixed >> np.uint64(1)))


def random_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": (version, np.array(words, dtype=np.uint32), gauss),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
