"""The driver's side of one submission's checkpoints: collects the ranks' reports, and commits.

A checkpoint exists once its manifest is written. One thread of the driver writes manifests, in
order, after every rank has reported that its parts are in the store. A second thread updates the
submission's record at intervals, so that other drivers see that this one is alive.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.keep import Keep
from sparkdml.checkpoint.manifest import Manifest, Part, Submission
from sparkdml.errors import CheckpointError

BEAT_SECONDS = 4.0
LAST_COMMIT_SECONDS = 120.0  # a store that stalls must not delay the end of a run indefinitely

Report = Mapping[str, Any]

# Of this process, until the end of their submission is in its record. A store that was full or
# read-only just then still says "running", and another submission must not take that for a rival.
_open: dict[tuple[int, float], Committer] = {}


def find_open(submission: Submission) -> Committer | None:
    """The committer of this process whose submission's end is not recorded."""
    return _open.get((submission.number, submission.started))


class Committer:
    """Lives as long as one submission."""

    def __init__(
        self,
        archive: Archive,
        submission: Submission,
        parent: Manifest | None,
        keep: Keep,
        plan: dict[str, str],
        data: dict[str, Any],
        on_commit: Callable[[Manifest], None],
    ) -> None:
        self.newest = parent
        self.data = data  # grows with what becomes known about the rows
        self._archive, self._keep, self._plan = archive, keep, plan
        self.submission = submission
        self._on_commit = on_commit
        self._lock = threading.Lock()  # each rank's report arrives on its own thread
        self._reports: dict[str, dict[int, Report]] = {}
        self._complete: queue.Queue[dict[int, Report] | None] = queue.Queue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sparkdml-commit", daemon=True)
        self._heart = threading.Thread(target=self._beat, name="sparkdml-beat", daemon=True)
        _open[submission.number, submission.started] = self
        self._thread.start()
        self._heart.start()

    @property
    def is_working(self) -> bool:
        """Whether the submission has not ended, or its last commit is still under way."""
        return not self._over.is_set() or self._thread.is_alive()

    def receive(self, rank: int, report: Report) -> None:
        """Take a rank's report on its parts. Must be quick: the caller also reads heartbeats."""
        with self._lock:
            reports = self._reports.setdefault(report["id"], {})
            reports[rank] = report
            if len(reports) == report["size"]:
                self._complete.put(self._reports.pop(report["id"]))

    def close(self, outcome: Any, cause: str | None = None, step: int | None = None) -> None:
        """Commit what is complete, then record how the submission ended."""
        self._complete.put(None)
        self._over.set()
        self._heart.join(timeout=LAST_COMMIT_SECONDS)
        self._thread.join(timeout=LAST_COMMIT_SECONDS)
        if self._thread.is_alive():
            warnings.warn(
                f"{self._archive.store.url} has not answered for {LAST_COMMIT_SECONDS:.0f} s: the "
                "last checkpoint may be missing",
                stacklevel=2,
            )
            return
        ended = replace(
            self.submission, outcome=outcome, cause=cause, failed_at_step=step, ended=time.time()
        )
        if self._record(ended):
            _open.pop((ended.number, ended.started), None)

    # -- the threads ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (reports := self._complete.get()) is not None:
            self._commit(reports)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self._record(replace(self.submission, beats=self.submission.beats + 1))

    def _record(self, submission: Submission) -> bool:
        self.submission = submission
        try:
            self._archive.record(submission)
        except Exception as error:
            warnings.warn(f"the run's record can't be written: {_reported(error)}", stacklevel=2)
            return False
        return True

    def _commit(self, reports: dict[int, Report]) -> None:
        first = reports[0]
        for rank, report in sorted(reports.items()):
            if report["error"] is not None:
                self._lost(report, f"rank {rank} on {report['worker']['host']}: {report['error']}")
                return
        workers = tuple(dict(reports[rank]["worker"]) for rank in sorted(reports))
        manifest = Manifest(
            id=first["id"],
            parent=None if self.newest is None else self.newest.id,
            submission=self.submission.number,
            step=first["step"],
            epoch=first["epoch"],
            kind=first["kind"],
            num_workers=first["size"],
            global_batch=first["global_batch"],
            plan=self._plan,
            plan_hash=plan_hash(self._plan, workers),
            data=dict(self.data),
            parts=tuple(Part(**part) for _, r in sorted(reports.items()) for part in r["parts"]),
            workers=workers,
            metrics=dict(first["metrics"]),
            created=time.time(),
            copy_seconds=max(report["copy_seconds"] for report in reports.values()),
            write_seconds=max(report["write_seconds"] for report in reports.values()),
        )
        if self.newest is not None and self.newest.plan_hash != manifest.plan_hash:
            _warn_of_other_bits(self.newest, manifest)
        try:
            self._archive.commit(manifest)
        except Exception as error:  # of any kind: this thread has no caller to raise it to
            self._lost(first, _reported(error))
            return
        parent, self.newest = self.newest, manifest
        self._on_commit(manifest)
        try:
            self._archive.prune(self._keep, {manifest.id} | ({parent.id} if parent else set()))
        except Exception as error:
            warnings.warn(
                f"the checkpoint of step {manifest.step} is safe, but older ones could not be "
                f"removed ({_reported(error)}). Removal is retried after the next checkpoint",
                stacklevel=2,
            )

    def _lost(self, report: Report, why: str) -> None:
        held = (
            "No checkpoint exists yet"
            if self.newest is None
            else f"The newest one is that of step {self.newest.step}"
        )
        warnings.warn(
            f"the checkpoint of step {report['step']} could not be written ({why}). {held}. "
            "Training continues, and the next checkpoint is taken when it is due",
            stacklevel=2,
        )


def _reported(error: Exception) -> str:
    """Format an error: our own messages are complete, others need their type's name."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def plan_hash(plan: Mapping[str, str], workers: tuple[dict[str, Any], ...]) -> str:
    """Hash all that the bits of a result depend on: the plan, and the kinds of workers."""
    content = json.dumps([sorted(plan.items()), sorted(kinds_of(workers))])
    return hashlib.sha256(content.encode()).hexdigest()


def kinds_of(workers: tuple[dict[str, Any], ...]) -> set[str]:
    return {
        f"{len(workers)} workers with {worker['threads']} threads on {worker['cpu']}, torch "
        f"{worker['torch']} on {worker['device'].partition(':')[0]}, backend {worker['backend']}"
        for worker in workers
    }


def _warn_of_other_bits(before: Manifest, now: Manifest) -> None:
    old, new = kinds_of(before.workers), kinds_of(now.workers)
    if old != new:
        warnings.warn(
            f"resumed with {' and '.join(sorted(new))}, started with "
            f"{' and '.join(sorted(old))}: the result is valid but not bit-identical",
            stacklevel=2,
        )
