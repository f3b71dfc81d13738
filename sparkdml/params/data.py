"""Params of how rows are chosen, split and drawn for training."""

from __future__ import annotations

from sparkdml.params.objects import to_validation
from sparkdml.params.param import (
    BY_LONE_WORKERS,
    AccessibleParams,
    Fingerprint,
    flag,
    function,
    param,
    text,
)


class DataParams(AccessibleParams):
    """Which rows are used, how they are sampled, and what changes a batch only in training."""

    validation = param(
        "validation",
        "fraction of rows to hold out, or a boolean column",
        to_validation,
        fingerprint=Fingerprint.ALWAYS,
    )
    stratifyCol = param(
        "stratifyCol",
        "column to stratify the validation split by",
        text("stratifyCol"),
        fingerprint=Fingerprint.WHEN_USED,
    )
    samplingCol = param(
        "samplingCol",
        "column of weights, in proportion to which rows are sampled in an epoch",
        text("samplingCol"),
        fingerprint=Fingerprint.WHEN_USED,
        refused=BY_LONE_WORKERS,
    )
    shuffle = param(
        "shuffle",
        "reshuffle the rows in each epoch",
        flag("shuffle"),
        default=True,
        fingerprint=Fingerprint.ALWAYS,
    )
    dropLast = param(
        "dropLast",
        "drop a worker's last batch of an epoch if it is short",
        flag("dropLast"),
        default=False,
        fingerprint=Fingerprint.WHEN_USED,
        refused=BY_LONE_WORKERS,
    )
    augment = param(
        "augment",
        "function (tensors by name) -> tensors by name, applied to each training batch",
        function("augment", "a function of tensors by name that returns tensors by name"),
        fingerprint=Fingerprint.WHEN_USED,
        is_object=True,
    )
    checkFinite = param(
        "checkFinite",
        "check the fed columns for NaN and infinities before the first step",
        flag("checkFinite"),
        default=False,
        fingerprint=Fingerprint.NEVER,
    )
