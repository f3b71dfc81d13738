"""What a checkpoint holds, and how each piece of it survives a change of the number of workers."""

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
    """One piece of state, and how it survives a change of the number of ranks.

    Args:
        value: tensors, numbers and text, nested in dicts and lists as needed.
        rule: "replicated" is the same on every rank, and written once. Of the others each rank has
            its own: with another number of ranks all get their "mean" or their "sum", and what is
            "reset" is left out, so that each rank begins as in a new run.
        weight: of this rank in a mean.
    """

    value: Any
    rule: Rule = "replicated"
    weight: float = 1.0


State = dict[str, Entry]


def merge(states: Sequence[State]) -> State:
    """The ranks' own states as one that any rank can go on from."""
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
    """Add up floats; whole numbers only if they are not to be scaled, else the first counts.

    The mean of equal values is that value to the bit, whatever it is: a constant stays one.
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
    # What has no weight may hold anything: an infinity times 0 would be NaN.
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
    """Not every rank has each key: the optimizer of one without rows has no momentum yet."""
    pairs = [
        (value[key], weight) for value, weight in zip(values, weights, strict=True) if key in value
    ]
    found, own = [value for value, _ in pairs], [weight for _, weight in pairs]
    if len(pairs) < len(values) and any(weight != 1.0 for weight in weights):
        total = sum(own)
        own = [weight / total if total else 1.0 / len(own) for weight in own]
    return found, own
