"""Submits a run again and again until it ends: from the newest checkpoint, on what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkdml.checkpoint.checkpointer import CheckpointPlan
from sparkdml.checkpoint.run import CheckpointedRun
from sparkdml.errors import StoreError
from sparkdml.runtime.restarts import Restarts, failed_step, one_line

if TYPE_CHECKING:
    from sparkdml.runtime.driver import OnEvent
    from sparkdml.runtime.spools import Spools

Submit = Callable[[int, CheckpointPlan], list[Any]]


def recover(
    run: CheckpointedRun,
    submit: Submit,
    count_workers: Callable[[bool], int],
    max_restarts: int,
    on_event: OnEvent,
    spools: Spools,
    patience_seconds: float,
) -> list[Any]:
    """Results of the submission that came through.

    `submit(num_workers, plan)` runs the workers once; `count_workers(restarted)` waits for slots.
    After a failure, a store that can't be reached is waited for, `patience_seconds` at most.
    """
    restarts = Restarts(max_restarts)
    restarted = False
    while True:
        num_workers = count_workers(restarted)
        excuses = len(run.rejected) + spools.num_losses
        plan = _begin(run, num_workers, restarted, restarts, patience_seconds)
        try:
            results = submit(num_workers, plan)
        except Exception as error:
            spools.left_behind()
            run.end("failed", one_line(error), failed_step(error))
            restarted = True
            if len(run.rejected) + spools.num_losses > excuses:
                continue  # a damaged checkpoint, or a spool that is gone: there is another way
            newest = -1 if run.newest is None else run.newest.step
            refusal = restarts.why_not(error, newest, plan.resume.step if plan.resume else 0)
            if refusal is not None:
                raise explain(error, restarts, refusal) from error.__cause__
            on_event(
                -1,
                {
                    "kind": "restart",
                    "cause": one_line(error),
                    "from_step": max(newest, 0),
                    "workers": num_workers,
                    "without_progress": restarts.count,
                    "allowed": max_restarts,
                },
            )
        except BaseException as interruption:
            spools.left_behind()
            run.end("failed", repr(interruption))
            raise
        else:
            run.end("finished")
            return results


def _begin(
    run: CheckpointedRun,
    num_workers: int,
    restarted: bool,
    restarts: Restarts,
    patience_seconds: float,
) -> CheckpointPlan:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return run.begin(run.find_start(), num_workers, restarted)
        except StoreError as error:
            if restarts.first_cause is None:
                raise
            if time.monotonic() >= deadline:
                raise explain(restarts.first_cause, restarts, str(error)) from error
        time.sleep(1)


def explain(error: Exception, restarts: Restarts, refusal: str) -> Exception:
    """The first cause since the last progress, and why it is final."""
    cause = restarts.first_cause or error
    if restarts.total and hasattr(cause, "add_note"):
        cause.add_note(f"Given up after {restarts.total} failures: {refusal}.")
    return cause
