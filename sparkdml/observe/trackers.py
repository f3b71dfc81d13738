"""Where a run's numbers are kept beside Spark: MLflow, TensorBoard, or an object of the user's own.

`MLflow` and `TensorBoard` are settings; each fit begins a run of its own there, so one estimator
may be fitted again and again, and by a CrossValidator in parallel.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sparkdml.errors import ParameterError, SetupError

MAX_PARAM_CHARACTERS = 500  # what the oldest MLflow servers take


@runtime_checkable
class Tracker(Protocol):
    """What a user's own tracker must have. Called at the driver, by one thread."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Numbers of a step: `step_loss` now and then, an epoch's row at its end."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class TrackerSettings(Protocol):
    """What makes a tracker for each run."""

    def begin(self, run: str, name: str, facts: Mapping[str, str]) -> Tracker:
        """A run of that id and name, and what else is known of it."""
        ...


@runtime_checkable
class ToldTheOutcome(Protocol):
    """A tracker that wants to know how the run ended, before it is closed."""

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
        "Give an object, not its class." if isinstance(tracker, type) else "",
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
    """Its id; it is made where it does not exist yet."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another fit may have been quicker
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
    """MLflow refuses other characters, and with them the whole request."""
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
