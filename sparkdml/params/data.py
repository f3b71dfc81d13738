"""Params of how rows are chosen, split and drawn for training."""

from __future__ import annotations

from typing import Any, ClassVar

from sparkdml.params.objects import to_validation
from sparkdml.params.param import AccessibleParams, flag, function, param, text


class DataParams(AccessibleParams):
    """Which rows, how often, and what is done to a batch only in training."""

    validation = param(
        "validation", "fraction of rows to hold out, or a boolean column", to_validation
    )
    stratifyCol = param(
        "stratifyCol",
        "column within each of whose values the fraction of validation is held out",
        text("stratifyCol"),
    )
    samplingCol = param(
        "samplingCol",
        "column of weights: how often a row is drawn in an epoch, in proportion",
        text("samplingCol"),
    )
    shuffle = param("shuffle", "shuffle anew each epoch", flag("shuffle"))
    dropLast = param(
        "dropLast", "leave out a worker's last batch of an epoch if it is short", flag("dropLast")
    )
    augment = param(
        "augment",
        "function (tensors by name) -> tensors by name, for each batch that is trained on",
        function("augment", "a function of tensors by name that returns tensors by name"),
    )
    checkFinite = param(
        "checkFinite",
        "look for NaN and infinities in the fed columns before the first step",
        flag("checkFinite"),
    )

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "shuffle": True,
        "dropLast": False,
        "checkFinite": False,
    }
