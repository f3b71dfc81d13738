"""The columns of the history: what writes each, what it means, and how it is shown.

This is the only list of the columns that sparkdml itself writes; losses, metrics and validation add
more. Pure values, known to all layers. A name chosen by the user must not be that of an existing
column, or one value would hide the other: `check_columns` checks that at the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparkdml.errors import ParameterError


@dataclass(frozen=True)
class HistoryColumn:
    """A column that sparkdml writes."""

    name: str  # or a pattern; <optimizer> stands for the name of one of several optimizers
    owner: str  # what writes it: every fit, a Param, or classes of callbacks and strategies
    meaning: str
    is_whole: bool = False  # a count, shown without a decimal point
    is_curve: bool = True  # drawn over the epochs, and part of the progress line
    is_reserved: bool = False  # no metric may have this name, in any fit


EVERY_FIT = "every fit"
OPTIMIZER = "<optimizer>"

COLUMNS = (
    HistoryColumn(
        "epoch",
        EVERY_FIT,
        "the epoch's number, from 1",
        is_whole=True,
        is_curve=False,
        is_reserved=True,
    ),
    HistoryColumn("loss", EVERY_FIT, "the mean loss of the rows in training", is_reserved=True),
    HistoryColumn(
        "rows",
        EVERY_FIT,
        "rows trained on, over all workers",
        is_whole=True,
        is_curve=False,
        is_reserved=True,
    ),
    HistoryColumn(
        "steps", EVERY_FIT, "optimizer steps", is_whole=True, is_curve=False, is_reserved=True
    ),
    HistoryColumn(
        "seconds",
        EVERY_FIT,
        "the time that training took, without validation",
        is_curve=False,
        is_reserved=True,
    ),
    HistoryColumn(
        "rows_per_second", EVERY_FIT, "`rows` by `seconds`", is_curve=False, is_reserved=True
    ),
    HistoryColumn(
        "loss_scale", 'precision="fp16"', "the factor of the loss at the end", is_reserved=True
    ),
    HistoryColumn(
        "skipped_steps",
        'precision="fp16"',
        "steps left out because a gradient overflowed, in the whole run",
        is_reserved=True,
    ),
    HistoryColumn("lr", "LearningRateSchedule", "the learning rate", is_reserved=True),
    HistoryColumn(
        "lr_[0-9]*", "LearningRateSchedule", "that of each parameter group after the first"
    ),
    HistoryColumn(f"{OPTIMIZER}_lr", "LearningRateSchedule", "that of each of several optimizers"),
    HistoryColumn(
        f"{OPTIMIZER}_lr_[0-9]*",
        "LearningRateSchedule",
        "that of its parameter groups after the first",
    ),
    HistoryColumn(
        "best_epoch", "BestModel", "the epoch with the best value so far", is_reserved=True
    ),
    HistoryColumn(
        "gradient_norm",
        "GradientMonitor, LBFGS, NewtonCG",
        "the norm of the gradient: the mean over the steps, or where the epoch ended",
    ),
    HistoryColumn("gradient_norm_max", "GradientMonitor", "the largest norm of a step"),
    HistoryColumn("gradient_norm_*", "GradientMonitor", "the mean norm of each child's gradient"),
    HistoryColumn("passes", "LBFGS, NewtonCG", "passes over the data that the step took"),
    HistoryColumn("step_length", "LBFGS, NewtonCG", "the length that the line search found"),
    HistoryColumn(
        "wait_seconds",
        "ParameterServer, Downpour, Hybrid",
        "what a worker waited for the servers, on average",
    ),
    HistoryColumn(
        "staleness",
        "ParameterServer, Downpour, Hybrid",
        "clocks that a read was behind, on average",
    ),
    HistoryColumn(
        "moved_rows", "AdaptiveBalance", "rows computed by another rank than their owner"
    ),
    HistoryColumn("skipped_rows", "BackupWorkers", "rows whose gradients came too late"),
    HistoryColumn(
        "consensus_distance", "Gossip, ADPSGD", "how far the replicas are from their average"
    ),
)

VALIDATION = "val_"  # before the name of what is measured on the rows held out
WHOLE = frozenset(column.name for column in COLUMNS if column.is_whole)
NOT_CURVES = frozenset(column.name for column in COLUMNS if not column.is_curve)
RESERVED = {column.name: column.owner for column in COLUMNS if column.is_reserved}


def loss_column(name: str) -> str:
    """Return the column of one of several losses."""
    return f"{name}_loss"


def check_metric(name: str) -> None:
    """Raise a ParameterError for a metric's name that no fit allows."""
    if name in RESERVED:
        raise _taken("metrics", name, name, RESERVED[name])
    if name.startswith(VALIDATION):
        raise _taken("metrics", name, f"{VALIDATION}…", "validation=")


def check_columns(
    metrics: Iterable[str],
    loss_names: Sequence[str],
    validates: bool,
    writers: Mapping[str, Iterable[str]],
) -> frozenset[str]:
    """Return the columns of a fit, without those of `writers`: what each Param's objects write.

    Raises a ParameterError for a column that two would write.
    """
    losses = {loss_column(name): name for name in loss_names}
    measured = ["loss", *losses, *metrics]
    owners = {column.name: EVERY_FIT for column in COLUMNS if column.owner == EVERY_FIT}
    if validates:
        owners |= {f"{VALIDATION}{name}": "validation=" for name in measured}
    written = set()
    for writer, columns in writers.items():
        parameter, _, owner = writer.partition(" ")
        for column in _patterns(columns, loss_names):
            for name, other in owners.items():
                if other != owner and fnmatchcase(name, column):
                    raise ParameterError(
                        parameter, owner, f"one without the column {name!r}, written by {other}"
                    )
            owners[column] = owner
            written.add(column)
    for column, name in losses.items():
        _check_free(owners, "optimizer", name, column)
        owners[column] = f"the loss of {name!r}"
    for name in metrics:
        _check_free(owners, "metrics", name, name)
        owners[name] = "another metric"
    return frozenset(owners.keys() - written)


def _patterns(columns: Iterable[str], loss_names: Sequence[str]) -> list[str]:
    """Return the columns that have the optimizers' names in them."""
    found = []
    for column in columns:
        names = loss_names if OPTIMIZER in column else [""]
        found += [column.replace(OPTIMIZER, name) for name in names]
    return found


def _check_free(owners: Mapping[str, str], parameter: str, name: str, column: str) -> None:
    for pattern, owner in owners.items():
        if fnmatchcase(column, pattern):
            raise _taken(parameter, name, column, owner)


def _taken(parameter: str, value: str, column: str, owner: str) -> ParameterError:
    return ParameterError(
        parameter,
        value,
        f"named differently: the history has a column {column!r} already, written by {owner}",
    )
