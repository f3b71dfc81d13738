"""Params of a run: its workers, its reaction to failures, its observers."""

from __future__ import annotations

from sparkdml.network.timeouts import HEARTBEAT_TIMEOUT
from sparkdml.observe.trackers import check_tracker
from sparkdml.params.objects import to_checkpoints
from sparkdml.params.param import (
    BY_LONE_WORKERS,
    AccessibleParams,
    Fingerprint,
    flag,
    number,
    one_of,
    param,
    path,
    whole,
)

_SECONDS = "a number of seconds above 0"


class RunParams(AccessibleParams):
    """Params of workers, failures and interruptions."""

    numWorkers = param(
        "numWorkers",
        "number of workers (Spark barrier tasks); default: all free slots",
        whole("numWorkers", 1),
        fingerprint=Fingerprint.NEVER,
    )
    cpusPerWorker = param(
        "cpusPerWorker",
        "torch threads per worker; default: spark.task.cpus",
        whole("cpusPerWorker", 1),
        fingerprint=Fingerprint.NEVER,
    )
    gpusPerWorker = param(
        "gpusPerWorker",
        "GPUs per worker, 0 or 1",
        one_of("gpusPerWorker", 0, 1),
        default=0,
        fingerprint=Fingerprint.NEVER,
    )
    slotTimeout = param(
        "slotTimeout",
        "seconds to wait for executors that are still registering",
        number("slotTimeout", "0 or more seconds", lambda value: value >= 0),
        default=60.0,
        fingerprint=Fingerprint.NEVER,
    )
    heartbeatTimeout = param(
        "heartbeatTimeout",
        "seconds without a heartbeat after which a worker counts as lost",
        number("heartbeatTimeout", _SECONDS, lambda value: value > 0),
        default=HEARTBEAT_TIMEOUT,
        fingerprint=Fingerprint.NEVER,
    )
    checkpoint = param(
        "checkpoint",
        "where checkpoints are stored: a dml.Checkpoints, or a path",
        to_checkpoints,
        fingerprint=Fingerprint.NEVER,
        refused=BY_LONE_WORKERS,
        is_object=True,
    )
    maxRestarts = param(
        "maxRestarts",
        "maximum restarts in a row without a new checkpoint (needs checkpoint=)",
        whole("maxRestarts", 0),
        default=3,
        fingerprint=Fingerprint.NEVER,
    )
    minWorkers = param(
        "minWorkers",
        "minimum number of workers to continue with after a failure",
        whole("minWorkers", 1),
        default=1,
        fingerprint=Fingerprint.NEVER,
    )
    replacementSeconds = param(
        "replacementSeconds",
        "seconds to wait for executors that replace lost ones, before continuing with fewer",
        number("replacementSeconds", "0 or more seconds", lambda value: value >= 0),
        default=60.0,
        fingerprint=Fingerprint.NEVER,
    )
    onInterrupt = param(
        "onInterrupt",
        "on Ctrl-C: 'raise', or 'stop-and-keep': end after this step and return the model so far",
        one_of("onInterrupt", "raise", "stop-and-keep"),
        default="raise",
        fingerprint=Fingerprint.NEVER,
        refused=BY_LONE_WORKERS,
    )
    dryRun = param(
        "dryRun",
        "first train on a few rows in the driver, to find mistakes early",
        flag("dryRun"),
        default=False,
        fingerprint=Fingerprint.NEVER,
    )


class WatchParams(AccessibleParams):
    """Params of what a run shows and logs."""

    timeline = param(
        "timeline",
        "path in the driver for a Chrome/Perfetto trace of all ranks",
        path("timeline"),
        fingerprint=Fingerprint.NEVER,
    )
    logs = param(
        "logs",
        "'driver': show what workers print and log in the driver, with rank and host",
        one_of("logs", "driver"),
        fingerprint=Fingerprint.NEVER,
    )
    tracker = param(
        "tracker",
        "where metrics are logged: dml.MLflow(…), dml.TensorBoard(…), or any object with "
        "log(step, metrics) and close()",
        check_tracker,
        fingerprint=Fingerprint.NEVER,
        is_object=True,
    )
    verbose = param(
        "verbose",
        "0: silent, 1: a line of progress, 2: details",
        one_of("verbose", 0, 1, 2),
        default=1,
        fingerprint=Fingerprint.NEVER,
    )
