"""Which checkpoints are kept, and which may be pruned. Driver only; pure.

Nothing is deleted that can't be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkdml.checkpoint.manifest import KINDS, Manifest
from sparkdml.errors import ParameterError


@dataclass(frozen=True)
class Keep:
    """What pruning keeps, besides the root, the final and the newest checkpoint.

    Args:
        last: how many of the newest checkpoints; None keeps all. With 1, only the root is left to
            resume from if the newest one turns out to be damaged.
        best: the name of a metric: the checkpoint with its best value is kept as well.
        mode: whether the best value is the lowest ("min") or the highest ("max").
        each_epoch: whether the checkpoint at the end of each epoch is kept as well.
    """

    last: int | None = 3
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    each_epoch: bool = False

    def __post_init__(self) -> None:
        if self.last is not None and not (_is_whole(self.last) and self.last >= 1):
            raise ParameterError("keep.last", self.last, "at least 1, or None to keep all")
        if self.best is not None and not (isinstance(self.best, str) and self.best):
            raise ParameterError("keep.best", self.best, 'the name of a metric such as "val_loss"')
        if self.mode not in ("min", "max"):
            raise ParameterError("keep.mode", self.mode, '"min" or "max"')
        if not isinstance(self.each_epoch, bool):
            raise ParameterError("keep.each_epoch", self.each_epoch, "True or False")

    @property
    def needs_epoch_ends(self) -> bool:
        """Whether epochs' ends must be checkpointed: only there do metrics fit the state."""
        return self.best is not None or self.each_epoch


def parse_keep(keep: int | Keep | None) -> Keep:
    """Convert `keep=` as users write it: a number, a Keep, or None to keep all."""
    if isinstance(keep, Keep):
        return keep
    if keep is None:
        return Keep(last=None)
    if _is_whole(keep) and keep >= 1:
        return Keep(last=keep)
    raise ParameterError(
        "keep", keep, "at least 1, a Keep(last=, best=, mode=, each_epoch=), or None to keep all"
    )


def to_prune(
    manifests: Sequence[Manifest], keep: Keep, protected: Collection[str] = ()
) -> list[Manifest]:
    """Return the checkpoints to prune, oldest first. All of `manifests` must be complete."""
    if keep.last is None:
        return []
    there = sorted((m for m in manifests if not m.pruned), key=age_order)
    kept = {m.id for m in there if m.kind in ("root", "final")}
    kept.update(m.id for m in there[-keep.last :])
    kept.update(protected)
    if keep.best is not None:
        kept.update(m.id for m in _best(there, keep.best, keep.mode))
    if keep.each_epoch:
        # An epoch that was trained again, after a resume from before it, replaces the old one.
        kept.update({m.epoch: m.id for m in there if m.kind == "epoch"}.values())
    return [m for m in there if m.id not in kept]


def age_order(manifest: Manifest) -> tuple[int, int, int]:
    """Sort key, oldest first. By submission, as drivers' clocks differ and steps are repeated."""
    return manifest.submission, manifest.step, KINDS.index(manifest.kind)


def _best(manifests: Sequence[Manifest], metric: str, mode: str) -> list[Manifest]:
    sign = 1 if mode == "min" else -1

    def rank(manifest: Manifest) -> tuple[float, bool, int, int, int]:
        # Checkpoints within an epoch carry the metrics of the epoch before it. Among those with
        # equal values, the epoch's end is the state that was measured, else the first one after it.
        at_end = manifest.kind in ("epoch", "final")
        return sign * manifest.metrics[metric], not at_end, *age_order(manifest)

    measured = [m for m in manifests if not math.isnan(m.metrics.get(metric, math.nan))]
    return [min(measured, key=rank)] if measured else []


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
