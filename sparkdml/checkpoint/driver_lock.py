"""One driver at a time: two that train into one place would each undo the other's work.

A driver writes its host, its process and a number that goes up into its submission's record. A
second one that finds such a record looks whether the process lives, where it can, or whether the
number still goes up.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.committer import BEAT_SECONDS
from sparkdml.checkpoint.manifest import Submission
from sparkdml.errors import CheckpointError

SILENT_SECONDS = 3 * BEAT_SECONDS
LOST = "the driver exited without reporting an outcome"


def this_driver() -> str:
    """Host, process, and when the process began: process numbers are used again."""
    return f"{socket.gethostname()}/{os.getpid()}/{psutil.Process().create_time():.2f}"


def take_over(
    archive: Archive, sleep: Callable[[float], None] = time.sleep, me: str | None = None
) -> list[Submission]:
    """The submissions so far, none of them running; an error if another driver is at work."""
    submissions = archive.submissions()
    for index, submission in enumerate(submissions):
        if submission.outcome != "running":
            continue
        if _is_alive(archive, submission, sleep, me or this_driver()):
            raise CheckpointError(
                f"another driver ({submission.driver}) is training into {archive.store.url}. Wait "
                "for it or end it, or use a new path"
            )
        last_seen = submission.started + submission.beats * BEAT_SECONDS
        submissions[index] = replace(submission, outcome="lost", cause=LOST, ended=last_seen)
        archive.record(submissions[index])
    return submissions


def _is_alive(
    archive: Archive, submission: Submission, sleep: Callable[[float], None], me: str
) -> bool:
    host, _, process = submission.driver.partition("/")
    if host == me.partition("/")[0]:
        pid, _, began = process.partition("/")
        return _process_lives(int(pid), began)
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        sleep(BEAT_SECONDS / 4)
        for now in archive.submissions():
            if now.number == submission.number and now.beats != submission.beats:
                return True
    return False


def _process_lives(pid: int, began: str) -> bool:
    try:
        found = psutil.Process(pid)
        # A killed driver stays a zombie if its parent does not wait for it, as in many containers.
        return f"{found.create_time():.2f}" == began and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
