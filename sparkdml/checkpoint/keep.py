"""Which checkpoints are kept, and which may go. Nothing is deleted that can't be replaced."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkdml.checkpoint.manifest import KINDS, Manifest
from sparkdml.errors import ParameterError


@dataclass(frozen=True)
class Keep:
    """What pruning leaves, besides the root, a final one, and the newest.

    last: the number of newest ones; None keeps all. With 1, a newest one that turns out to be
    damaged leaves nothing but the root to go on from. best: the name of a metric; the checkpoint
    with the best value of it is kept, too. mode: whether the best value is the lowest or the
    highest. each_epoch: the one at the end of each epoch is kept, too.
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
        """Whether epochs' ends must be checkpointed: only there are a state's metrics its own."""
        return self.best is not None or self.each_epoch


def parse_keep(keep: int | Keep | None) -> Keep:
    """`keep=` as users write it: how many, a Keep, or None for all of them."""
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
    """Those whose parts may go, oldest first. All of `manifests` must be complete checkpoints."""
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
    """Sorts oldest first. By submission, as drivers' clocks may differ and steps come again."""
    return manifest.submission, manifest.step, KINDS.index(manifest.kind)


def _best(manifests: Sequence[Manifest], metric: str, mode: str) -> list[Manifest]:
    sign = 1 if mode == "min" else -1

    def rank(manifest: Manifest) -> tuple[float, bool, int, int, int]:
        # Checkpoints within an epoch carry the metrics of the epoch before it. Of those with one
        # value, the epoch's end is the state that was measured, else the one soonest after it.
        at_end = manifest.kind in ("epoch", "final")
        return sign * manifest.metrics[metric], not at_end, *age_order(manifest)

    measured = [m for m in manifests if not math.isnan(m.metrics.get(metric, math.nan))]
    return [min(measured, key=rank)] if measured else []


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
