"""The driver's side of a run that keeps checkpoints, over all of its submissions.

Runs in the driver's process: the caller's thread opens the run and begins submissions, and the
control server's threads bring the workers' reports. Owns the claim to the place of the checkpoints
and the committer of the current submission.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.archive import Archive, new_probe
from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.committer import Committer
from sparkdml.checkpoint.driver_lock import take_over, this_driver
from sparkdml.checkpoint.fingerprint import data_differences, differences
from sparkdml.checkpoint.manifest import Manifest, Submission
from sparkdml.errors import CheckpointError
from sparkdml.network.timeouts import Timeouts
from sparkdml.runtime.driver import preflight
from sparkdml.runtime.driver.cluster import find_cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparkdml.checkpoint.checkpoints import Checkpoints
    from sparkdml.checkpoint.stores.places import StoreAccess

HOW_TO_RESUME = (
    "Use a new path for a new run, or Checkpoints(..., resume='force') to resume this one anyway"
)


@contextmanager
def open_run(
    checkpoints: Checkpoints,
    spark: SparkSession,
    plan: dict[str, str],
    data: dict[str, Any],
    on_event: Callable[[int, dict[str, Any]], None],
    timeouts: Timeouts,
    replay_from: Manifest | None = None,
) -> Iterator[CheckpointedRun]:
    """Claims the place for this driver until the end of the block."""
    cluster = find_cluster(spark)
    with checkpoints.open(spark) as access:
        settings = preflight.read_settings(cluster.setting)
        preflight.check_relay(settings, access.needs_relay, access.url)
        host = cluster.driver_host()
        run = CheckpointedRun(
            checkpoints,
            access,
            plan=plan,
            data=data,
            host=host,
            on_event=on_event,
            timeouts=timeouts,
            replay_from=replay_from,
        )
        try:
            yield run
        finally:
            run.close()


@dataclass
class CheckpointedRun:
    """Chooses the checkpoint to resume from, and has the new ones committed."""

    checkpoints: Checkpoints
    access: StoreAccess
    plan: dict[str, str]
    data: dict[str, Any]
    host: str
    on_event: Callable[[int, dict[str, Any]], None]
    timeouts: Timeouts
    replay_from: Manifest | None = None  # only read, and from here
    rejected: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._archive = Archive(self.access.driver_store())
        self._committer: Committer | None = None
        self._start: Manifest | None = None
        self._submissions: list[Submission] = []
        if self.replay_from is None:
            self._submissions = take_over(self._archive)
        self._place = self.access.worker_place(self.host, secrets.token_urlsafe(32), self.timeouts)
        self._probe = None if self.replay_from else new_probe()
        if self._probe is not None:
            self._write_probe(self._probe)
            self._archive.sweep(self._probe)

    def _write_probe(self, name: str) -> None:
        """Workers look for it: one that can't find it has another disk under the same path."""
        self._archive.store.write(name, [b"shared"])

    def _restore_probe(self, name: str, start: Manifest | None) -> None:
        """If it is gone, so is what was in the store then; a newer checkpoint may be whole."""
        try:
            self._archive.store.read(name)
        except FileNotFoundError:
            if start is None and self.newest is not None:
                raise CheckpointError(
                    f"the checkpoint folder {self._archive.store.url} was removed while this run "
                    f"was training into it, and with it the checkpoint of step {self.newest.step}, "
                    "so there is nothing to resume from. Restore the folder, or start the run again"
                ) from None
            warnings.warn(
                f"the checkpoint folder {self._archive.store.url} was removed while this run was "
                "training into it",
                stacklevel=2,
            )
            self._write_probe(name)

    # -- what to resume from --------------------------------------------------------------------

    def find_start(self) -> Manifest | None:
        """The newest checkpoint that was not found damaged, if it is of this very run."""
        if self.replay_from is not None:
            self._check_plan(self.replay_from)
            return self.replay_from
        manifest = self._archive.newest(self.rejected)
        if manifest is not None:
            self._check_plan(manifest)
        return manifest

    def find_result(
        self, epochs: int, count_rows: Callable[[], Mapping[str, int]]
    ) -> tuple[Manifest, Mapping[str, Any]] | None:
        """The end of the run, if it has ended already: it is not trained again by accident.

        `count_rows` computes the rows' number and the sum of their hashes; it is called only where
        the files of the data don't say that they are the same.
        """
        manifest = self.find_start()
        if manifest is None:
            return None
        if manifest.epoch + (manifest.kind == "step") > epochs:
            raise CheckpointError(
                f"{self._archive.store.url} holds this run, trained into epoch "
                f"{manifest.epoch + (manifest.kind == 'step')}, and epochs={epochs}. Use a new "
                "path, or more epochs"
            )
        if manifest.kind != "final":
            return None
        try:
            state = self._archive.read(manifest)
        except CheckpointError as error:
            self.reject(manifest.id, str(error))
            return None
        if manifest.epoch < epochs and state["progress"].value["stopped"] is None:
            return None
        files = self.data.get("files")
        if not files or None in files.values() or files != manifest.data.get("files"):
            self._object(data_differences(manifest.data, {**self.data, **count_rows()}))
        return manifest, {name: entry.value for name, entry in state.items()}

    def _check_plan(self, manifest: Manifest) -> None:
        found = differences(manifest.plan, self.plan)
        if manifest.data.get("schema") != self.data.get("schema"):
            found.append(
                f"the data's schema was {manifest.data.get('schema')}, is now "
                f"{self.data.get('schema')}"
            )
        self._object(found)

    def check_data(self, facts: Mapping[str, Any]) -> str | None:
        """Why these rows are not those of the run, once Spark has counted them."""
        now = {**self.data, "num_rows": facts["num_rows"], "hash_sum": facts["hash_sum"]}
        if self._committer is not None:
            self._committer.data = now
        found = [] if self._start is None else data_differences(self._start.data, now)
        try:
            self._object(found)
        except CheckpointError as error:
            return str(error)
        return None

    def _object(self, found: list[str]) -> None:
        if not found:
            return
        text = "; ".join(found)
        if self.checkpoints.resume == "force":
            warnings.warn(f"resuming although {text}", stacklevel=2)
            return
        raise CheckpointError(
            f"{self._archive.store.url} holds another run: {text}. {HOW_TO_RESUME}. If the data is "
            "computed by something nondeterministic, write it out or persist it first"
        )

    # -- submissions ----------------------------------------------------------------------------

    @property
    def newest(self) -> Manifest | None:
        return None if self._committer is None else self._committer.newest

    def begin(self, start: Manifest | None, num_workers: int, restarted: bool) -> CheckpointPlan:
        """A new submission, from `start` on."""
        if restarted and self._probe is not None:
            self._restore_probe(self._probe, start)
        self._start = start
        number = self._submissions[-1].number + 1 if self._submissions else 1
        submission = Submission(
            number=number,
            reason="restart" if restarted else "start" if start is None else "resume",
            resumed_from=None if start is None else start.id,
            num_workers=num_workers,
            started=time.time(),
            driver=this_driver(),
        )
        failed = [s for s in self._submissions if s.outcome in ("failed", "lost")]
        plan = CheckpointPlan(
            place=self._place,
            probe=self._probe,
            submission=number,
            resume=start,
            every=self.checkpoints.every,
            epoch_ends=self.checkpoints.keep.needs_epoch_ends,
            writes=self.replay_from is None,
            failures=len(failed),
            elapsed_seconds=sum((s.ended or s.started) - s.started for s in self._submissions),
            failure_seconds=self.checkpoints.failure_seconds,
        )
        if self.replay_from is None:
            self._archive.record(submission)
            self._submissions.append(submission)
            self._committer = Committer(
                self._archive,
                submission,
                parent=start,
                keep=self.checkpoints.keep,
                plan=self.plan,
                data=dict(self.data),
                on_commit=self._committed,
            )
        return plan

    def receive(self, rank: int, report: Mapping[str, Any]) -> None:
        """A worker's parts of a checkpoint are written, or failed to be."""
        if self._committer is not None:
            self._committer.receive(rank, report)

    def reject(self, id: str, why: str) -> None:
        """A checkpoint is damaged: the next submission resumes from an older one."""
        self.rejected.add(id)
        warnings.warn(
            f"skipping damaged checkpoint {id} and resuming from its parent: {why}", stacklevel=2
        )

    def end(self, outcome: Any, cause: str | None = None, step: int | None = None) -> None:
        """The submission is over: commit what is complete, and write down how it ended."""
        if self._committer is not None:
            self._committer.close(outcome, cause, step)
            self._submissions[-1] = self._committer.submission

    def close(self) -> None:
        if self._probe is None:
            return
        try:
            self._archive.store.remove(self._probe)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"{self._probe} is left behind in the store: {error}", stacklevel=2)

    def _committed(self, manifest: Manifest) -> None:
        self.on_event(
            -1,
            {
                "kind": "checkpoint",
                "id": manifest.id,
                "parent": manifest.parent,
                "ckpt_kind": manifest.kind,
                "step": manifest.step,
                "bytes": manifest.num_bytes,
                "copy_seconds": manifest.copy_seconds,
                "write_seconds": manifest.write_seconds,
            },
        )
