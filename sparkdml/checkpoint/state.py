"""What a checkpoint holds, and how each piece adapts to another number of workers.

Pure; used by strategies and callbacks in the workers, and by the checkpointer when it resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Rule = Literal["replicated", "mean", "sum", "reset"]


@dataclass(frozen=True)
class Entry:
    """One piece of state, and how it adapts to another number of ranks.

    Args:
        value: tensors, numbers and text, nested in dicts and lists as needed.
        rule: "replicated": the value is the same on every rank and written once. With any other
            rule each rank has its own value. If the number of ranks changes, all ranks get their
            "mean" or their "sum"; a "reset" value is dropped, so that each rank starts as in a new
            run.
        weight: the weight of this rank in a mean.
    """

    value: Any
    rule: Rule = "replicated"
    weight: float = 1.0


State = dict[str, Entry]


def merge(states: Sequence[State]) -> State:
    """Merge the ranks' own states into one that any rank can resume from."""
    merged: State = {}
    for name, first in states[0].items():
        entries = [state[name] for state in states]
        if first.rule in ("mean", "sum"):
            weights = [entry.weight for entry in entries]
            total = sum(weights)
            if first.rule == "sum":
                weights = [1.0] * len(entries)
            elif total:
                weights = [weight / total for weight in weights]
            else:
                weights = [1.0 / len(entries)] * len(entries)
            value = _combine([entry.value for entry in entries], weights)
            merged[name] = Entry(value, first.rule, total / len(entries))
    return merged


def _combine(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Add up floats; whole numbers only if they are not scaled, else the first one is taken.

    The mean of equal values is exactly that value, so a constant stays a constant.
    """
    first = values[0]
    if isinstance(first, dict):
        return {
            key: _combine(*_having(key, values, weights))
            for key in dict.fromkeys(key for value in values for key in value)
        }
    if isinstance(first, list | tuple):
        parts = zip(*values, strict=True)
        return type(first)(_combine(part, weights) for part in parts)
    if isinstance(first, Tensor):
        scaled = first.is_floating_point() or first.is_complex()
    elif isinstance(first, np.ndarray):
        scaled = first.dtype.kind in "fc"
    else:
        scaled = isinstance(first, float)
    adds_up = all(weight == 1.0 for weight in weights)
    if isinstance(first, bool | str) or first is None or not (scaled or adds_up):
        return first
    if not adds_up and all(_is_equal(first, value) for value in values[1:]):
        return first
    # A value of weight 0 may be infinite, and infinity times 0 would be NaN.
    weighed = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if isinstance(first, Tensor) and scaled:
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float64))
        for value, weight in weighed:
            total += value.to(total.dtype) * weight
        return total.to(first.dtype)
    shares = [value if adds_up else value * weight for value, weight in weighed]
    return sum(shares[1:], start=shares[0])


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other))


def _having(
    key: Any, values: Sequence[dict[Any, Any]], weights: Sequence[float]
) -> tuple[list[Any], list[float]]:
    """Return all keys. Ranks may lack some: an optimizer without rows has no momentum yet."""
    pairs = [
        (value[key], weight) for value, weight in zip(values, weights, strict=True) if key in value
    ]
    found, own = [value for value, _ in pairs], [weight for _, weight in pairs]
    if len(pairs) < len(values) and any(weight != 1.0 for weight in weights):
        total = sum(own)
        own = [weight / total if total else 1.0 / len(own) for weight in own]
    return found, own
