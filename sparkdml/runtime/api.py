"""`dml.run`: a function in every worker, with or without data. The layer below the estimator.

Runs at the driver, on the caller's thread: checks the arguments, makes a `LaunchRequest` of them,
and launches it with its observers and, if there is `checkpoint=`, with the run that is kept there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.checkpoints import Checkpoints
from sparkdml.checkpoint.fingerprint import describe_data
from sparkdml.errors import ParameterError
from sparkdml.feed.columns.schema import describe_columns
from sparkdml.feed.feed import FeedPlan
from sparkdml.network.timeouts import HEARTBEAT_TIMEOUT
from sparkdml.observe.observers import Calls, Observer, Observers, OutputPrinter, RestartWarnings
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun, open_run
from sparkdml.runtime.driver.cluster import find_cluster
from sparkdml.runtime.driver.jobs import is_rdd
from sparkdml.runtime.driver.launch import launch
from sparkdml.runtime.driver.request import LaunchRequest, MakeService, no_service
from sparkdml.runtime.protocol.plan import Options, Resources
from sparkdml.runtime.worker.context import Context
from sparkdml.session import find_session

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession


def run(
    fn: Callable[[Context], Any],
    data: DataFrame | RDD[Any] | None = None,
    num_workers: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    backend: str = "auto",
    seed: int = 0,
    cpus_per_worker: int | None = None,
    gpus_per_worker: int = 0,
    slot_timeout: float = 60.0,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
    checkpoint: Checkpoints | str | None = None,
    max_restarts: int = 3,
    min_workers: int = 1,
    replacement_seconds: float = 60.0,
    logs: str | None = None,
    on_event: Callable[[int, dict[str, Any]], None] | None = None,
    name: str | None = None,
    spark: SparkSession | None = None,
) -> list[Any]:
    """Run `fn(ctx)` in `num_workers` Spark tasks at once; their results in rank order.

    Args:
        fn: gets a `Context` with `rank`, `size`, `local_rank`, `device`, `comm`, `feed(...)`. An
            unmodified Horovod or DDP script works too: `hvd.init()` and `env://` find the other
            workers.
        data: a DataFrame or an RDD; its rows are cut into shards by a hash of their content, and
            each worker reads its own. None for a function that brings its own data.
        num_workers: None takes every slot of the cluster.
        columns: the columns of a DataFrame to feed; None for all.
        backend: of `ctx.comm`: "horovod", "torch", "mpi", or "auto" for Horovod where it is
            installed.
        seed: of the shards, of the shuffling, and of torch, numpy and random in every worker.
        cpus_per_worker: torch threads of each worker; None for spark.task.cpus.
        gpus_per_worker: how many GPUs Spark must assign to each worker.
        slot_timeout: how long to wait for executors that are still registering, in seconds.
        heartbeat_timeout: after how many seconds without a heartbeat a worker counts as lost.
        checkpoint: where `ctx.checkpoint` saves and resumes from: a `dml.Checkpoints` or its path.
            With it, a run that fails resumes from its newest checkpoint.
        max_restarts: how many failures in a row are tolerated without a new checkpoint.
        min_workers: the fewest workers to continue with after a failure.
        replacement_seconds: how long to wait for an executor to replace a lost one.
        logs: "driver" shows what workers print and log at the driver, with rank and host.
        on_event: called at the driver with (rank, message) for what `ctx.log` sends (kind "log"),
            and for events of the run itself: failures, restarts, checkpoints (rank -1).
        name: what the Spark UI shows.
        spark: the session; None for the data's own, or the active one.

    Raises:
        WorkerError: a worker failed; has its rank, host and traceback.
        NotEnoughSlots, SetupError, DataError, ParameterError: before any worker starts.
    """
    if not callable(fn):
        raise ParameterError("fn", fn, "a function of one argument, the context")
    if logs not in (None, "driver"):
        raise ParameterError("logs", logs, "'driver' or None")
    session = find_session(data, spark)
    options = Options(
        num_workers=num_workers,
        resources=find_resources(session, cpus_per_worker, gpus_per_worker),
        backend=backend,
        seed=seed,
        slot_timeout=slot_timeout,
        heartbeat_timeout=heartbeat_timeout,
        max_restarts=max_restarts,
        min_workers=min_workers,
        replacement_seconds=replacement_seconds,
        forwards_output=logs == "driver",
        name=name or f"sparkdml: {getattr(fn, '__name__', 'run')}",
    )
    request = LaunchRequest(
        session,
        fn,
        options,
        data=data,
        feed=make_feed_plan(data, columns, seed),
        make_service=find_service(fn),
    )
    with ExitStack() as opened:
        observers = opened.enter_context(Observers(_observers(logs, on_event)))
        request = replace(request, on_event=observers.handle)
        if checkpoint is not None:
            request = replace(request, run=opened.enter_context(_open_run(checkpoint, request)))
        return launch(request)


def _observers(
    logs: str | None, on_event: Callable[[int, dict[str, Any]], None] | None
) -> list[Observer]:
    observers: list[Observer] = [RestartWarnings()]
    if logs == "driver":
        observers.append(OutputPrinter())
    if on_event is not None:
        observers.append(Calls(on_event))
    return observers


def _open_run(
    checkpoint: Checkpoints | str, request: LaunchRequest
) -> AbstractContextManager[CheckpointedRun]:
    from pyspark.sql import DataFrame

    checkpoints = Checkpoints(checkpoint) if isinstance(checkpoint, str) else checkpoint
    if not isinstance(checkpoints, Checkpoints):
        raise ParameterError("checkpoint", checkpoint, "a path, or dml.Checkpoints(path, …)")
    fn, data = request.body, request.data
    return open_run(
        checkpoints,
        request.spark,
        plan={
            "function": getattr(fn, "__qualname__", type(fn).__qualname__),
            "seed": str(request.options.seed),
        },
        data=describe_data(data) if isinstance(data, DataFrame) else {},
        on_event=request.on_event,
        timeouts=request.options.timeouts,
    )


def find_service(fn: Any) -> MakeService:
    """What a function object keeps at the driver, if it has a method `driver_service`."""
    made: MakeService = getattr(fn, "driver_service", no_service)
    return made


def make_feed_plan(
    data: DataFrame | RDD[Any] | None, columns: Sequence[str] | None, seed: int
) -> FeedPlan | None:
    if data is None:
        return None
    if is_rdd(data):
        if columns is not None:
            raise ParameterError(
                "columns", columns, "None for an RDD", "Map the RDD to the fields that you need."
            )
        return FeedPlan((), seed)
    from pyspark.sql import DataFrame

    if not isinstance(data, DataFrame):
        raise ParameterError("data", type(data).__name__, "a DataFrame, an RDD or None")
    names = list(data.columns) if columns is None else list(columns)
    if not names:
        raise ParameterError("columns", names, "at least one column")
    return FeedPlan(tuple(describe_columns(data.schema, names)), seed)


def find_resources(spark: SparkSession, cpus: int | None, gpus: int) -> Resources:
    if cpus is None:
        cpus = find_cluster(spark).task_cpus()
    if cpus < 1:
        raise ParameterError("cpus_per_worker", cpus, "at least 1, or None for spark.task.cpus")
    if gpus not in (0, 1):
        raise ParameterError("gpus_per_worker", gpus, "0 or 1", "A rank drives one GPU.")
    return Resources(cpus, gpus)
