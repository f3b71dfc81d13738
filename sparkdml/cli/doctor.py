"""`sparkdml doctor`: checks that this machine can train, and suggests a fix for each problem.

The exit code is 0 unless a check FAILs. The slow checks (a Spark session, an allreduce between two
processes) run concurrently, in child processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

from sparkdml.cli.checks import Check, horovod, machine, software, workers
from sparkdml.cli.terminal import Colour, paint

_COLOURS: dict[str, Colour] = {"ok": "green", "warn": "yellow", "FAIL": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master",
        default=os.environ.get("MASTER", "local[*]"),
        help="the Spark master to check (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the Spark master (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    if not options.json:
        print(f"Checking this machine and {options.master} …", flush=True)
    checks = examine(options.master, options.timeout)
    if options.json:
        print(as_json(checks))
    else:
        print(as_table(checks, sys.stdout))
    return 1 if any(check.status == "FAIL" for check in checks) else 0


def examine(master: str, timeout_seconds: float) -> list[Check]:
    """Run every check, in the order in which problems are best fixed."""
    # Import torch once, here: threads that import it concurrently wait for each other anyway.
    versions = guarded("packages", software.check_packages)
    found_java = guarded("Java", lambda: [software.check_java()])
    usable = not any(
        check.status == "FAIL" and check.name in ("Java", "Spark")
        for check in (*found_java, *versions)
    )
    with ThreadPoolExecutor() as pool:
        horovod_later = pool.submit(guarded, "Horovod", horovod.check_horovod)
        session = (
            workers.open_session(master, timeout_seconds)
            if usable
            else workers.Session(problem="skipped: fix Java or pyspark first")
        )
        checks = [
            *found_java,
            *versions,
            *guarded("workers' Python", lambda: [workers.check_interpreter()]),
            *workers.check_session(master, session),
            *horovod_later.result(),
        ]
    return [
        *checks,
        *guarded("GPUs", lambda: [machine.check_gpus(session.settings)]),
        *guarded("ports", lambda: [machine.check_ports()]),
        *guarded("disk", lambda: machine.check_spool(session.settings.get("spark.local.dir", ""))),
        *guarded("shared memory", lambda: [machine.check_shared_memory()]),
    ]


def guarded(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Report an exception in a check as its result, so that the other checks are still shown."""
    try:
        return check()
    except Exception as error:
        found = f"the check raised {type(error).__name__}: {error}"
        return [Check(name, "FAIL", found, "this is a bug in sparkdml; please report it")]


def as_json(checks: Sequence[Check]) -> str:
    return json.dumps(
        {
            "ok": all(check.status != "FAIL" for check in checks),
            "checks": [dataclasses.asdict(check) for check in checks],
        },
        indent=2,
    )


def as_table(checks: Sequence[Check], stream: TextIO) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        status = paint(f"{check.status:4}", _COLOURS[check.status], stream)
        lines.append(f"{status}  {check.name:{width}}  {check.found}")
        if check.fix:
            lines.append(f"{'':4}  {'':{width}}  fix: {check.fix}")
    counts = {status: sum(c.status == status for c in checks) for status in _COLOURS}
    if counts["FAIL"]:
        summary = paint(f"{counts['FAIL']} failed", "red", stream)
    else:
        summary = paint("ready", "green", stream)
    if counts["warn"]:
        summary += f", {counts['warn']} warning{'s' if counts['warn'] > 1 else ''}"
    return "\n".join([*lines, "", summary])
