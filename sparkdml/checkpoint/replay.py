"""Replay: the state after any past step, from the nearest checkpoint before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparkdml.checkpoint.encoding import decode
from sparkdml.errors import ParameterError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparkdml.checkpoint.checkpoints import Checkpoints
    from sparkdml.estimator import TorchEstimator


@dataclass(frozen=True)
class Replayed:
    """A past state of a run, as rank 0 had it."""

    step: int
    module: nn.Module
    state: Mapping[str, Any]  # parameters, optimizer, random, progress, callbacks, …
    losses: Mapping[int, float]  # of the steps that were trained again
    from_step: int  # of the checkpoint


def replay(
    checkpoints: Checkpoints, step: int, estimator: TorchEstimator, dataset: DataFrame
) -> Replayed:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ParameterError("step", step, "a whole number, 0 or more")
    start, following = checkpoints.nearest(step)
    # The steps behind a checkpoint were trained by those who wrote the next one.
    num_workers = (following or start).num_workers
    fit = estimator._prepare(dataset)
    shared, own, losses = fit.replay(checkpoints, start, num_workers, step)
    entries = {**decode(shared, "the replayed state"), **decode(own, "the replayed state")}
    state = {name: entry.value for name, entry in entries.items()}
    with torch.no_grad():
        for name, parameter in fit.module.named_parameters(remove_duplicate=False):
            parameter.copy_(state["parameters"][name])
        for name, buffer in fit.module.named_buffers():
            buffer.copy_(state["buffers"][name])
    first = start.step + 1
    return Replayed(
        step=step,
        module=fit.module,
        state=state,
        losses={first + index: loss for index, loss in enumerate(losses)},
        from_step=start.step,
    )
