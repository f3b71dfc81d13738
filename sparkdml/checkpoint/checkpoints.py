"""`dml.Checkpoints`: where a run's checkpoints lie, how often they are taken, which are kept."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.keep import Keep, parse_keep
from sparkdml.checkpoint.lineage import Lineage
from sparkdml.checkpoint.manifest import Manifest
from sparkdml.checkpoint.policy import Interval, check_failure_seconds, parse_every
from sparkdml.checkpoint.stores.places import StoreAccess, resolve_place
from sparkdml.errors import CheckpointError, ParameterError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sparkdml.checkpoint.replay import Replayed
    from sparkdml.estimator import TorchEstimator


class Checkpoints:
    """A place for the checkpoints of one run.

    Args:
        path: a URL that every host can reach: `s3://…`, `gs://…`, `hdfs://…`, a shared disk. A path
            without a scheme means what it means to Spark.
        every: "auto" (from what a checkpoint costs and how often the run fails), a number of steps,
            a `timedelta`, or text: "100 steps", "10 min", "epoch".
        keep: how many are kept, a `dml.Keep(last=, best=, mode=, each_epoch=)`, or None for all.
        resume: what to do if the place holds another run. "auto": say what differs, and stop;
            "force": go on from its newest state all the same.
        failure_seconds: the mean time between failures, for "auto"; None: as observed.
        storage_options: for the store, as fsspec takes them: credentials, an endpoint.
    """

    def __init__(
        self,
        path: str,
        every: int | str | timedelta | Interval = "auto",
        keep: int | Keep | None = 3,
        *,
        resume: Literal["auto", "force"] = "auto",
        failure_seconds: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(path, str) or not path:
            raise ParameterError("path", path, "a URL or a path, for instance 's3://bucket/run'")
        if resume not in ("auto", "force"):
            raise ParameterError("resume", resume, "'auto' or 'force'")
        self.path = path
        self.every = parse_every(every)
        self.keep = parse_keep(keep)
        self.resume = resume
        self.failure_seconds = check_failure_seconds(failure_seconds)
        self.storage_options = dict(storage_options or {})

    def open(self, spark: SparkSession | None) -> StoreAccess:
        return resolve_place(self.path, self.storage_options, spark)

    def lineage(self) -> Lineage:
        """The graph of all checkpoints: where the run began, failed, resumed, forked, ended.

        Prints as text; a notebook shows it as a picture.
        """
        with self.open(_session(self.path)) as access:
            archive = Archive(access.driver_store())
            return Lineage(archive.manifests(), archive.submissions())

    def newest(self) -> Manifest | None:
        """The complete checkpoint from which a run would go on."""
        with self.open(_session(self.path)) as access:
            return Archive(access.driver_store()).newest()

    def replay(self, step: int, estimator: TorchEstimator, dataset: DataFrame) -> Replayed:
        """The state after any past step, trained again from the nearest checkpoint before it.

        Nothing is written. `estimator` and `dataset` are those of the run; with as many workers as
        then, the state is the same bit for bit.
        """
        from sparkdml.checkpoint.replay import replay

        return replay(self, step, estimator, dataset)

    def nearest(self, step: int) -> tuple[Manifest, Manifest | None]:
        """The checkpoint at or before a step, and the next one on the way to the run's end."""
        lineage = self.lineage()
        found = lineage.nearest(step)
        if found is None:
            raise CheckpointError(f"{self.path} has no checkpoint at or before step {step}")
        tip = lineage.line()[-1]
        if step > tip.step:
            raise ParameterError("step", step, f"a step of the run's past: 0 to {tip.step}")
        return found, lineage.after(found)

    def without_secrets(self) -> Checkpoints:
        """For a file: credentials in `storage_options` are nobody else's business."""
        return Checkpoints(
            self.path,
            self.every,
            self.keep,
            resume=self.resume,
            failure_seconds=self.failure_seconds,
        )

    def __repr__(self) -> str:
        return f"Checkpoints({self.path!r}, every={str(self.every)!r})"


def _session(path: str) -> SparkSession | None:
    """The active one, if there is one. Only a path without a scheme means nothing without Spark."""
    from pyspark.sql import SparkSession

    from sparkdml.runtime.api import find_session

    return SparkSession.getActiveSession() or (None if ":" in path else find_session(None))
