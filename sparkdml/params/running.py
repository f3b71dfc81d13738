"""Params of where a run's workers are, what they survive, and how it is watched."""

from __future__ import annotations

from typing import Any, ClassVar

from sparkdml.observe.trackers import check_tracker
from sparkdml.params.objects import to_checkpoints
from sparkdml.params.param import AccessibleParams, flag, number, one_of, param, path, whole

_SECONDS = "a number of seconds above 0"


class RunParams(AccessibleParams):
    """Workers, failures, interruptions."""

    numWorkers = param(
        "numWorkers", "barrier tasks; unset: as many as there are slots", whole("numWorkers", 1)
    )
    cpusPerWorker = param(
        "cpusPerWorker", "torch threads a worker; unset: spark.task.cpus", whole("cpusPerWorker", 1)
    )
    gpusPerWorker = param("gpusPerWorker", "GPUs a worker, 0 or 1", one_of("gpusPerWorker", 0, 1))
    slotTimeout = param(
        "slotTimeout",
        "seconds to wait for executors that are still registering",
        number("slotTimeout", "0 or more seconds", lambda value: value >= 0),
    )
    heartbeatTimeout = param(
        "heartbeatTimeout",
        "silent seconds after which a worker is given up",
        number("heartbeatTimeout", _SECONDS, lambda value: value > 0),
    )
    checkpoint = param(
        "checkpoint", "a dml.Checkpoints, or its path: where the run is saved", to_checkpoints
    )
    maxRestarts = param(
        "maxRestarts",
        "with checkpoint=: failures that are let pass without a new checkpoint in between",
        whole("maxRestarts", 0),
    )
    minWorkers = param(
        "minWorkers", "workers to go on with after a failure, at least", whole("minWorkers", 1)
    )
    replacementSeconds = param(
        "replacementSeconds",
        "seconds to wait for an executor in place of a lost one, before going on with fewer",
        number("replacementSeconds", "0 or more seconds", lambda value: value >= 0),
    )
    onInterrupt = param(
        "onInterrupt",
        "on Ctrl-C: 'raise', or 'stop-and-keep': end after this step and return the model so far",
        one_of("onInterrupt", "raise", "stop-and-keep"),
    )
    dryRun = param(
        "dryRun",
        "first take a few rows through model and loss at the driver, where mistakes show at once",
        flag("dryRun"),
    )

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "gpusPerWorker": 0,
        "slotTimeout": 60.0,
        "heartbeatTimeout": 8.0,
        "maxRestarts": 3,
        "minWorkers": 1,
        "replacementSeconds": 60.0,
        "onInterrupt": "raise",
        "dryRun": False,
    }


class WatchParams(AccessibleParams):
    """What is seen of a run."""

    timeline = param(
        "timeline", "file at the driver for a Chrome/Perfetto trace of all ranks", path("timeline")
    )
    logs = param(
        "logs",
        "'driver': what workers print and log is shown at the driver, with rank and host",
        one_of("logs", "driver"),
    )
    tracker = param(
        "tracker",
        "where numbers are logged: dml.MLflow(…), dml.TensorBoard(…), or anything with "
        "log(step, metrics) and close()",
        check_tracker,
    )
    verbose = param(
        "verbose", "0: silent, 1: a line of progress, 2: details", one_of("verbose", 0, 1, 2)
    )

    DEFAULTS: ClassVar[dict[str, Any]] = {"verbose": 1}
