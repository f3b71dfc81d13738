"""Carries out a run: check what can be checked, submit, and submit again after a failure.

Runs at the driver, on the thread that called `fit` or `dml.run`. With checkpoints, a new submission
resumes from the newest one, with as many workers as the cluster still has slots for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.errors import CheckpointError, StoreError
from sparkdml.feed.validation_split import with_strata
from sparkdml.runtime.driver import preflight
from sparkdml.runtime.driver.checkpointed_run import CheckpointedRun
from sparkdml.runtime.driver.cluster import Cluster, find_cluster
from sparkdml.runtime.driver.failures import Restarts, failed_step, one_line
from sparkdml.runtime.driver.request import LaunchRequest, begin_submission
from sparkdml.runtime.driver.slots import Slots
from sparkdml.runtime.driver.spools import Spools
from sparkdml.runtime.driver.submission import Submission


def launch(request: LaunchRequest) -> list[Any]:
    """Run the request's body in every task of every role; the results in the tasks' order."""
    cluster = find_cluster(request.spark)
    slots = Slots(cluster, request.options, request.roles)
    settings = preflight.read_settings(cluster.setting)
    preflight.check_settings(
        settings,
        many=slots.has_open_wires,
        spools=request.data is not None,
        gang=slots.has_gang,
    )
    cluster.check_worker_python()
    num_workers = slots.wait()
    request = replace(request, feed=with_strata(request.data, request.feed))
    if request.run is None:
        return submit(request, cluster, num_workers)
    recovery = Recovery(request, request.run, cluster, slots, Spools())
    try:
        return recovery.run_until_done(num_workers)
    finally:
        recovery.spools.remove_left(request.spark, cluster.shares_disks)


def submit(
    request: LaunchRequest,
    cluster: Cluster,
    num_workers: int,
    *,
    checkpoint: CheckpointPlan | None = None,
    spools: Spools | None = None,
) -> list[Any]:
    """Run the tasks once."""
    context = begin_submission(request, cluster, num_workers, checkpoint=checkpoint, spools=spools)
    start = None if checkpoint is None else checkpoint.resume
    request.on_event(
        -1,
        {
            "kind": "submission",
            "number": 1 if checkpoint is None else checkpoint.submission,
            "workers": num_workers,
            "from_step": 0 if start is None else start.step,
            "backend": context.backend,
        },
    )
    return Submission(context).run()


@dataclass
class Recovery:
    """Submits a run with checkpoints until it ends, or until a failure is final."""

    request: LaunchRequest
    run: CheckpointedRun
    cluster: Cluster
    slots: Slots
    spools: Spools

    def __post_init__(self) -> None:
        self._restarts = Restarts(self.request.options.max_restarts)

    def run_until_done(self, first_count: int) -> list[Any]:
        num_workers, restarted = first_count, False
        while True:
            excuses = self._num_excuses()
            plan = self._begin(num_workers, restarted)
            try:
                results = submit(
                    self.request,
                    self.cluster,
                    num_workers,
                    checkpoint=plan,
                    spools=self.spools,
                )
            except Exception as error:
                self.spools.left_behind()
                self.run.end("failed", one_line(error), failed_step(error))
                if self._num_excuses() == excuses:
                    self._check_restart(error, plan, num_workers)
                # Else a checkpoint is damaged or a spool is gone, and the next attempt avoids it.
            except BaseException as interruption:
                self.spools.left_behind()
                self.run.end("failed", repr(interruption))
                raise
            else:
                self.run.end("finished")
                return results
            restarted = True
            num_workers = self.slots.wait_again(first_count)

    def _num_excuses(self) -> int:
        return len(self.run.rejected) + self.spools.num_losses

    def _begin(self, num_workers: int, restarted: bool) -> CheckpointPlan:
        """After a failure, a store that can't be reached is waited for."""
        deadline = time.monotonic() + self.request.options.replacement_seconds
        cause = self._restarts.first_cause
        while True:
            try:
                return self.run.begin(self.run.find_start(), num_workers, restarted)
            except StoreError as error:
                if cause is None:
                    raise
                if time.monotonic() >= deadline:
                    raise self._restarts.explain(cause, str(error)) from error
            except CheckpointError as error:
                if cause is None:
                    raise
                raise error from cause  # why the run was to be restarted at all
            time.sleep(1)

    def _check_restart(self, error: Exception, plan: CheckpointPlan, num_workers: int) -> None:
        """Raise if this failure is final; else tell the observers of the restart."""
        newest = -1 if self.run.newest is None else self.run.newest.step
        start_step = plan.resume.step if plan.resume else 0
        refusal = self._restarts.why_not(error, newest, start_step)
        if refusal is not None:
            final = self._restarts.explain(error, refusal)
            raise final from final.__cause__
        self.request.on_event(
            -1,
            {
                "kind": "restart",
                "cause": one_line(error),
                "from_step": max(newest, 0),
                "workers": num_workers,
                "without_progress": self._restarts.count,
                "allowed": self._restarts.max_restarts,
            },
        )
