"""A lock that lets one driver at a time use a place: two would overwrite each other's work.

Driver only, on the thread that starts the run. A driver writes its host, its process and a growing
counter into its submission's record. A second driver that finds a running submission checks whether
that process is alive, if it is on the same host, or else whether the counter still grows.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from sparkdml.checkpoint.archive import Archive
from sparkdml.checkpoint.committer import BEAT_SECONDS, find_open
from sparkdml.checkpoint.manifest import Submission
from sparkdml.errors import CheckpointError

SILENT_SECONDS = 3 * BEAT_SECONDS
CLOCK_SECONDS = 2.0  # by which a process's beginning may have moved with the clock
LOST = "the driver exited without reporting an outcome"


def this_driver() -> str:
    """Return the host, the pid and the process's start time, since pids are reused."""
    return f"{socket.gethostname()}/{os.getpid()}/{_beginning(os.getpid())}"


def take_over(
    archive: Archive, sleep: Callable[[float], None] = time.sleep, me: str | None = None
) -> list[Submission]:
    """Return the submissions so far, none of them running.

    Raises a CheckpointError if another driver is at work.
    """
    submissions = archive.submissions()
    for index, submission in enumerate(submissions):
        if submission.outcome != "running":
            continue
        if _is_alive(archive, submission, sleep, me or this_driver()):
            raise CheckpointError(
                f"another driver ({submission.driver}) is training into {archive.store.url}. Wait "
                "for it or end it, or use a new path"
            )
        own = find_open(submission)
        if own is not None:  # its end could not be written: the store was full or read-only
            submissions[index] = own.submission
            archive.record(own.submission)
            continue
        last_seen = submission.started + submission.beats * BEAT_SECONDS
        submissions[index] = replace(submission, outcome="lost", cause=LOST, ended=last_seen)
        archive.record(submissions[index])
    return submissions


def _is_alive(
    archive: Archive, submission: Submission, sleep: Callable[[float], None], me: str
) -> bool:
    own = find_open(submission)
    if own is not None:
        return own.is_working
    if submission.driver == me:
        return False  # of this process, and it ended before it began to commit
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
        return _is_beginning(pid, began) and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _beginning(pid: int) -> str:
    """Return the start time, on Linux in ticks since boot, which the clock does not move."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return f"{psutil.Process(pid).create_time():.2f}"
    # The command's name, in parentheses, may have any characters; 20 fields on is "starttime".
    return f"{boot[:8]}:{int(stat.rpartition(b')')[2].split()[19])}"


def _is_beginning(pid: int, began: str) -> bool:
    if ":" in began:
        return _beginning(pid) == began
    # By the clock, as elsewhere than on Linux and in records of earlier versions.
    difference: float = psutil.Process(pid).create_time() - float(began)
    return abs(difference) < CLOCK_SECONDS
