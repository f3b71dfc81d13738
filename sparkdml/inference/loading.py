"""The module in a worker: built once a process, and kept for the next batch, task and query."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from pyspark import cloudpickle
from torch import nn

from sparkdml.inference.structure import fill
from sparkdml.inference.weights import ShippedWeights
from sparkdml.training.modules import build_module
from sparkdml.training.plan import ModelSource


@dataclass(frozen=True)
class ShippedModel:
    """A structure without weights, pickled; or, for modules that can't be, what makes them."""

    weights: ShippedWeights
    structure: bytes | None = field(default=None, repr=False)
    source: ModelSource | None = None

    def build(self) -> nn.Module:
        state = self.weights.state()
        if self.structure is not None:
            skeleton: nn.Module = cloudpickle.loads(self.structure)
            return fill(skeleton, state)
        assert self.source is not None
        module = build_module(self.source)
        module.load_state_dict(state)
        return module


_LOADED: OrderedDict[tuple[str, str], nn.Module] = OrderedDict()
_MAX_LOADED = 4
_LOADING = threading.Lock()


def load_module(model: ShippedModel, device: torch.device) -> nn.Module:
    """In eval mode, on the device. Whoever runs it keeps it: only so many stay here."""
    key = model.weights.key, str(device)
    with _LOADING:
        if key not in _LOADED:
            if not _LOADED:
                # Spark's workers look for garbage after every task, which takes 0.2 s of going
                # through all that torch imports. None of that is ever garbage.
                gc.freeze()
            _LOADED[key] = model.build().eval().to(device)
            while len(_LOADED) > _MAX_LOADED:
                _LOADED.popitem(last=False)
        _LOADED.move_to_end(key)
        return _LOADED[key]
