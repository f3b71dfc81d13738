"""Trackers: where a run's numbers are kept beside Spark. MLflow, TensorBoard, or the user's own.

`MLflow` and `TensorBoard` are settings; each fit begins a run of its own there, so one estimator
may be fitted again and again, and by a CrossValidator in parallel.

Runs in the driver. `TrackerObserver` is handed events on the observers' thread and calls the
tracker on a thread of its own, which lives as long as the run: a tracking server that is slow or
down costs numbers, never training time. docs/how-to-write-a-tracker.md says what a tracker may
rely on.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sparkdml.errors import ParameterError, SetupError, SparkDMLError

MAX_PARAM_CHARACTERS = 500  # what the oldest MLflow servers take


@runtime_checkable
class Tracker(Protocol):
    """What `tracker=` takes. All calls come from one thread at the driver."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers of a step: `step_loss` now and then, at an epoch's end its row."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class TrackerSettings(Protocol):
    """What `tracker=` takes to make a tracker for each run."""

    def begin(self, run: str, name: str, facts: Mapping[str, str]) -> Tracker:
        """The tracker of a new run; `facts` describe it. On the tracker's thread, too."""
        ...


@runtime_checkable
class ReceivesOutcome(Protocol):
    """A tracker that `begin` returned and that is told, before `close`, how the run ended."""

    def end(self, outcome: str, cause: str | None) -> None:
        """`outcome` is "finished", "failed" or "interrupted"."""
        ...


def check_tracker(tracker: object) -> Tracker | TrackerSettings:
    if isinstance(tracker, Tracker | TrackerSettings) and not isinstance(tracker, type):
        return tracker
    raise ParameterError(
        "tracker",
        tracker,
        "dml.MLflow(…), dml.TensorBoard(…), or an object with log(step, metrics) and close()",
        "Pass an object, not its class." if isinstance(tracker, type) else "",
    )


@dataclass(frozen=True)
class MLflow:
    """Each fit is a run of `experiment` at the MLflow server `uri`, with its Params and metrics.

    Without `uri`, MLflow decides as always: MLFLOW_TRACKING_URI, or a local store.
    """

    uri: str | None = None
    experiment: str = "sparkdml"
    run_name: str | None = None  # the model's, if None
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if find_spec("mlflow") is None:
            raise SetupError("dml.MLflow needs mlflow: pip install 'sparkdml[mlflow]'")
        if not self.experiment:
            raise ParameterError("experiment", self.experiment, "the name of an experiment")

    def begin(self, run: str, name: str, facts: Mapping[str, str]) -> MLflowRun:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        made = client.create_run(
            find_experiment(client, self.experiment),
            run_name=self.run_name or name,
            tags={**self.tags, "sparkdml.run": run},
        )
        begun = MLflowRun(client, made.info.run_id)
        begun.describe(facts)
        return begun


def find_experiment(client: Any, name: str) -> str:
    """The id of an experiment, which is created if it does not exist yet."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another fit may have created it
            if found is None:
                raise
    return str(found.experiment_id)


class MLflowRun:
    """One run at an MLflow server."""

    _STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self.run_id = client, run_id
        self._status = "FINISHED"

    def describe(self, facts: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        params = [
            Param(mlflow_name(name), value[:MAX_PARAM_CHARACTERS] or "-")
            for name, value in facts.items()
        ]
        for start in range(0, len(params), 100):  # as many as a request may have
            self._client.log_batch(self.run_id, params=params[start : start + 100])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self.run_id,
            metrics=[Metric(mlflow_name(n), value, now, step) for n, value in metrics.items()],
        )

    def end(self, outcome: str, cause: str | None) -> None:
        self._status = self._STATUS[outcome]
        if cause:
            self._client.set_tag(self.run_id, "sparkdml.cause", cause)

    def close(self) -> None:
        self._client.set_terminated(self.run_id, self._status)


def mlflow_name(name: str) -> str:
    """A name that MLflow accepts: for any other character it refuses the whole request."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)[:250]


@dataclass(frozen=True)
class TensorBoard:
    """Each fit gets a subfolder of `folder`, for `tensorboard --logdir folder`."""

    folder: str

    def __post_init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise SetupError("dml.TensorBoard needs it: pip install 'sparkdml[tensorboard]'")
        object.__setattr__(self, "folder", str(self.folder))  # a Path, perhaps
        if not self.folder:
            raise ParameterError("folder", self.folder, "a folder's path")

    def begin(self, run: str, name: str, facts: Mapping[str, str]) -> TensorBoardRun:
        from torch.utils.tensorboard import SummaryWriter

        words = re.sub(r"[^\w.-]+", "-", name).strip("-")
        moment = time.strftime("%Y%m%d-%H%M%S")
        writer = SummaryWriter(str(Path(self.folder) / f"{moment}-{words}-{run}"))
        begun = TensorBoardRun(writer)
        begun.describe(facts)
        return begun


class TensorBoardRun:
    """One run as TensorBoard's event files."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def describe(self, facts: Mapping[str, str]) -> None:
        rows = "\n".join(f"| {n} | `{value.replace('|', '¦')}` |" for n, value in facts.items())
        self._writer.add_text("run", f"| | |\n|---|---|\n{rows}")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self, outcome: str, cause: str | None) -> None:
        self._writer.add_text("outcome", f"{outcome}: {cause}" if cause else outcome)

    def close(self) -> None:
        self._writer.close()


STEP_LOSSES_PER_SECOND = 2.0  # more than that, of a million steps, would swamp a tracker
MAX_WAITING = 10_000
CLOSE_SECONDS = 20.0

_FACTS = ("strategy", "backend", "workers", "epochs", "batch_size", "global_batch", "seed")


class TrackerObserver:
    """An observer that logs epoch rows, thinned step losses and what workers log, in order.

    Steps and epochs that are repeated after a restart are logged once. An error of the tracker is
    raised by the next call of `handle` or `close`, upon which `Observers` drops this observer.
    """

    def __init__(self, tracker: Tracker | TrackerSettings) -> None:
        self._given = check_tracker(tracker)
        self._name = type(tracker).__name__
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._start: dict[str, Any] | None = None
        self._end: tuple[str, str | None] = ("finished", None)
        self._step = self._last_epoch = 0
        self._last_loss_time = 0.0
        self._num_dropped = 0
        self._ready = threading.Condition()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._feed_safely, name="sparkdml-tracker", daemon=True
        )
        self._thread.start()

    def handle(self, rank: int, event: dict[str, Any]) -> None:
        self._raise_error()
        kind = event["kind"]
        if kind == "run-start":
            with self._ready:
                self._start = event
                self._ready.notify()
        elif kind == "steps":
            self._steps(event)
        elif kind == "epoch":
            self._epoch(event["row"])
        elif kind == "evaluation":
            found = {f"evaluator/{name}": value for name, value in event["values"].items()}
            self._put(numbers(found), event["step"])
        elif kind == "log":
            prefix = f"rank_{rank}/" if rank > 0 else ""
            self._put({prefix + name: value for name, value in numbers(event["values"]).items()})
        elif kind == "run-end":
            self._end = (event["outcome"], event.get("cause"))

    def close(self) -> None:
        """Wait until all is logged, CLOSE_SECONDS at most; then warn if anything was lost."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(CLOSE_SECONDS)
        self._raise_error()
        if self._thread.is_alive():
            warnings.warn(
                f"the tracker {self._name} has been blocked for {CLOSE_SECONDS:g} s: "
                f"{len(self._waiting):,} entries that it has not taken may be lost",
                stacklevel=2,
            )
        elif self._num_dropped:
            warnings.warn(
                f"the tracker {self._name} could not keep up: {self._num_dropped:,} entries were "
                "dropped",
                stacklevel=2,
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise SparkDMLError(
                f"the tracker {self._name} failed and gets no more numbers: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def _steps(self, event: dict[str, Any]) -> None:
        if event["step"] <= self._step:
            return  # repeated after a restart
        self._step = event["step"]
        moment = event.get("time", time.time())
        if moment - self._last_loss_time < 1 / STEP_LOSSES_PER_SECOND:
            return
        self._last_loss_time = moment
        step, loss = event["losses"][-1]
        self._put({"step_loss": float(loss)}, step)

    def _epoch(self, row: Mapping[str, float]) -> None:
        if row["epoch"] > self._last_epoch:
            self._last_epoch = int(row["epoch"])
            self._put(numbers(row))

    def _put(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not metrics:
            return
        with self._ready:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append((self._step if step is None else step, metrics))
            self._ready.notify()

    # -- the thread -----------------------------------------------------------------------------

    def _feed_safely(self) -> None:
        try:
            self._feed()
        except Exception as error:
            self._error = error

    def _feed(self) -> None:
        tracker = self._begin()
        if tracker is None:
            return
        try:
            while (entry := self._next()) is not None:
                tracker.log(*entry)
            if tracker is not self._given and isinstance(tracker, ReceivesOutcome):
                tracker.end(*self._end)
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to report
                tracker.close()
            raise
        tracker.close()

    def _begin(self) -> Tracker | None:
        """None if the run never started."""
        if isinstance(self._given, Tracker):
            return self._given
        with self._ready:
            self._ready.wait_for(lambda: self._start or self._waiting or self._closing)
            start = self._start
            if start is None and not self._waiting:
                return None
        start = start or {"run": "", "name": "sparkdml"}
        facts = {name: str(start[name]) for name in _FACTS if start.get(name) is not None}
        facts |= {f"plan.{name}": str(value) for name, value in start.get("plan", {}).items()}
        return self._given.begin(start["run"], start["name"], facts)

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """None when the run is over and all entries are logged."""
        with self._ready:
            self._ready.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
