"""`dml.Checkpoints`: where a run's checkpoints are stored, when they are taken, which are kept.

Driver only. Two Protocols stand for what replays a past step: this folder knows no estimator and no
runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.encoding import decode
from sparkdml.checkpoint.keep import Keep, parse_keep
from sparkdml.checkpoint.lineage import Lineage
from sparkdml.checkpoint.manifest import Manifest
from sparkdml.checkpoint.policy import Interval, check_failure_seconds, parse_every
from sparkdml.checkpoint.stores.base import CheckpointStore
from sparkdml.checkpoint.stores.places import GivenPlace, StoreAccess, check_store, resolve_place
from sparkdml.checkpoint.stores.urls import split_password
from sparkdml.errors import CheckpointError, ParameterError
from sparkdml.session import find_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ReplayableRun(Protocol):
    """A run that is ready to be replayed."""

    @property
    def module(self) -> nn.Module: ...

    def replay(
        self, checkpoints: Checkpoints, start: Manifest, num_workers: int, step: int
    ) -> tuple[bytes, bytes, list[float]]:
        """Return the encoded state after `step` (shared, and rank 0's own), and the losses."""
        ...


class Replayable(Protocol):
    """Makes a replayable run for a DataFrame: an estimator."""

    def _prepare(self, dataset: DataFrame) -> ReplayableRun: ...


@dataclass(frozen=True)
class Replayed:
    """A past state of a run, as rank 0 had it."""

    step: int
    module: nn.Module
    state: Mapping[str, Any]  # parameters, optimizer, random, progress, callbacks, …
    losses: Mapping[int, float]  # of the steps that were trained again
    from_step: int  # of the checkpoint


class Checkpoints:
    """Where and how the checkpoints of one run are stored.

    Args:
        path: a URL that every host can reach: `s3://…`, `gs://…`, `hdfs://…`, a shared disk. A path
            without a scheme means what it means to Spark.
        every: "auto" (from what a checkpoint costs and how often the run fails), a number of steps,
            a `timedelta`, or text: "100 steps", "10 min", "epoch".
        keep: how many to keep, a `dml.Keep(last=, best=, mode=, each_epoch=)`, or None to keep all.
        resume: what to do if the place holds the checkpoints of another run. "auto": raise an error
            that lists the differences; "force": resume from its newest state all the same.
        failure_seconds: the mean time between failures, for "auto"; None: estimated from the run.
        store: a store of your own instead of `path`: a `dml.CheckpointStore`. It must be picklable,
            since the workers use copies of it.
        storage_options: passed to fsspec for the store: credentials, an endpoint.
    """

    def __init__(
        self,
        path: str | None = None,
        every: int | str | timedelta | Interval = "auto",
        keep: int | Keep | None = 3,
        *,
        store: CheckpointStore | None = None,
        resume: Literal["auto", "force"] = "auto",
        failure_seconds: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if store is not None:
            for name, value in (("path", path), ("storage_options", storage_options)):
                if value:
                    raise ParameterError(name, value, "left out where store= is given")
            check_store(store)
        elif not isinstance(path, str) or not path:
            raise ParameterError(
                "path", path, "a URL or a path, for instance 's3://bucket/run'; or store= is given"
            )
        if resume not in ("auto", "force"):
            raise ParameterError("resume", resume, "'auto' or 'force'")
        self.path = path
        self.store = store
        self.every = parse_every(every)
        self.keep = parse_keep(keep)
        self.resume = resume
        self.failure_seconds = check_failure_seconds(failure_seconds)
        self.storage_options = dict(storage_options or {})

    @property
    def url(self) -> str:
        """The URL, for messages: without a password."""
        return self.store.url if self.store is not None else split_password(str(self.path))[0]

    def open(self, spark: SparkSession | None = None) -> StoreAccess:
        """Open the store; with None, the session is found if the path needs one."""
        if self.store is not None:
            return StoreAccess(GivenPlace(self.store))
        assert self.path is not None
        return resolve_place(self.path, self.storage_options, spark or _session(self.path))

    def lineage(self) -> Lineage:
        """Return the graph of all checkpoints: where the run began, failed, resumed, forked, ended.

        It prints as text; a notebook shows it as a picture.
        """
        with self.open() as access:
            archive = Archive(access.driver_store())
            return Lineage(archive.manifests(), archive.submissions())

    def newest(self) -> Manifest | None:
        """Return the complete checkpoint from which a run would resume, if there is one."""
        with self.open() as access:
            return Archive(access.driver_store()).newest()

    def replay(self, step: int, estimator: Replayable, dataset: DataFrame) -> Replayed:
        """Return the state after any past step, replayed from the nearest checkpoint before it.

        Nothing is written. `estimator` and `dataset` are those of the run; with the same number of
        workers, the state is the same bit for bit.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ParameterError("step", step, "a whole number, 0 or more")
        start, following = self.nearest(step)
        # The steps after a checkpoint were trained by the workers that wrote the next one.
        num_workers = (following or start).num_workers
        fit = estimator._prepare(dataset)
        shared, own, losses = fit.replay(self, start, num_workers, step)
        entries = {**decode(shared, "the replayed state"), **decode(own, "the replayed state")}
        state = {name: entry.value for name, entry in entries.items()}
        with torch.no_grad():
            for name, parameter in fit.module.named_parameters(remove_duplicate=False):
                parameter.copy_(state["parameters"][name])
            for name, buffer in fit.module.named_buffers():
                buffer.copy_(state["buffers"][name])
        first = start.step + 1
        return Replayed(
            step=step,
            module=fit.module,
            state=state,
            losses={first + index: loss for index, loss in enumerate(losses)},
            from_step=start.step,
        )

    def nearest(self, step: int) -> tuple[Manifest, Manifest | None]:
        """Return the checkpoint at or before a step, and the next one on the main line."""
        lineage = self.lineage()
        found = lineage.nearest(step)
        if found is None:
            raise CheckpointError(f"{self.url} has no checkpoint at or before step {step}")
        tip = lineage.line()[-1]
        if step > tip.step:
            raise ParameterError("step", step, f"a step of the run's past: 0 to {tip.step}")
        return found, lineage.after(found)

    def without_secrets(self) -> Checkpoints:
        """Return a copy to save, without `storage_options` and without a password in the path."""
        assert self.path is not None
        return Checkpoints(
            split_password(self.path)[0],
            self.every,
            self.keep,
            resume=self.resume,
            failure_seconds=self.failure_seconds,
        )

    def __repr__(self) -> str:
        where = repr(self.url) if self.store is None else f"store={self.store!r}"
        return f"Checkpoints({where}, every={str(self.every)!r})"


def _session(path: str) -> SparkSession | None:
    """Return the active session, if there is one. Only a path without a scheme needs it."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() or (None if ":" in path else find_session(None))
