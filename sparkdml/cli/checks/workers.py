"""Checks of Spark: its workers' Python, its slots, and settings that barrier jobs can't use."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkdml.cli.checks import Check

_NAME = "workers' Python"
_ERROR = re.compile(
    r'(?:Exception in thread "main" |Caused by: )?(?:[\w$]+\.)*(\w+(?:Error|Exception)): (.+)'
)
# Errors that only wrap another one: the gateway's, py4j's, Spark's around a worker's.
_WRAPPERS = ("JAVA_GATEWAY_EXITED", "Py4JJavaError", "PYTHON_EXCEPTION")
_WANTED = ("torch", "pyarrow", "sparkdml")
_DESCRIBE = (
    "import importlib.util as u, json, sys; "
    f"print(json.dumps(['%d.%d' % sys.version_info[:2], "
    f"[m for m in {_WANTED!r} if u.find_spec(m) is None]]))"
)


@dataclass(frozen=True)
class Session:
    """The findings of the session probe; `problem` says why there are none."""

    spark: str = ""
    slots: int = 0
    workers: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def check_interpreter(environment: Mapping[str, str] = os.environ) -> Check:
    """Check the Python that a plain `SparkSession.builder` would use for workers here."""
    chosen = environment.get("PYSPARK_PYTHON")
    path = shutil.which(chosen or "python3", path=environment.get("PATH"))
    if path is None:
        return judge_interpreter(chosen, None, "", [])
    # Run it outside the checkout's folder: `-c` puts the current folder on the module path.
    trial = subprocess.run(
        [path, "-c", _DESCRIBE], capture_output=True, text=True, check=False, cwd="/"
    )
    if trial.returncode != 0:
        return judge_interpreter(chosen, None, "", [])
    version, missing = json.loads(trial.stdout)
    return judge_interpreter(chosen, path, version, missing)


def judge_interpreter(
    chosen: str | None, path: str | None, version: str, missing: list[str]
) -> Check:
    """`chosen` is PYSPARK_PYTHON (None: not set), `path` its executable (None: not found)."""
    fix = f"export PYSPARK_PYTHON={sys.executable}"
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    # If it is not set, sparkdml's session builder sets it: only other sessions would fail.
    bad: Any = "FAIL" if chosen else "warn"
    if not chosen:
        fix += " or start the session with sparkdml.session_builder()"
    origin = "PYSPARK_PYTHON" if chosen else "python3 on the PATH"
    if path is None:
        return Check(_NAME, bad, f"{origin} ({chosen or 'python3'}) doesn't run", fix)
    if version != here:
        return Check(_NAME, bad, f"{path} is {version}, the driver's is {here}", fix)
    if missing:
        return Check(_NAME, bad, f"{path} ({origin}) has no {', '.join(missing)}", fix)
    return Check(_NAME, "ok", f"{version} at {path} ({origin})")


def open_session(master: str, timeout_seconds: float = 60.0) -> Session:
    """Run the probe in a child process; workers use this Python unless PYSPARK_PYTHON is set."""
    environment = dict(os.environ)
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if master.startswith("local"):
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # A JVM that lives for seconds should not spend time on optimising: this halves the wait.
    options = (
        environment.get("JAVA_TOOL_OPTIONS", ""),
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
    )
    environment["JAVA_TOOL_OPTIONS"] = " ".join(filter(None, options))
    try:
        trial = subprocess.run(
            [sys.executable, "-m", "sparkdml.cli.checks.session_probe", master],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return Session(problem=f"no answer from {master} within {timeout_seconds:.0f} s")
    if trial.returncode != 0:
        return Session(problem=reason(trial.stderr))
    return Session(**json.loads(trial.stdout.strip().splitlines()[-1]))


def reason(stderr: str) -> str:
    """Return the most informative line of the output: the last error that wraps no other."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [
        f"{found[1]}: {found[2]}"
        for line in lines
        if (found := _ERROR.match(line)) and not any(word in line for word in _WRAPPERS)
    ]
    return (errors or lines or ["the process exited without output"])[-1][:300]


def check_session(master: str, session: Session) -> list[Check]:
    if session.problem:
        return [
            Check("Spark session", "FAIL", f"{master}: {session.problem}", _session_fix(master))
        ]
    return [
        Check("Spark session", "ok", f"{master} with Spark {session.spark}"),
        *[judge_worker(worker) for worker in session.workers],
        judge_slots(session.slots, master),
        judge_settings(session.settings),
    ]


def judge_worker(worker: dict[str, str]) -> Check:
    found = f"a job ran {worker['python']} ({worker['version']}) on {worker['host']}"
    if worker["missing"]:
        return Check(
            _NAME,
            "FAIL",
            f"{found}, which has no {worker['missing']}",
            f"install {worker['missing']} there, or set PYSPARK_PYTHON to a Python that has them",
        )
    return Check(_NAME, "ok", found)


def judge_slots(slots: int, master: str) -> Check:
    found = f"{slots} at {master}"
    if slots < 2:
        fix = "use local[2] or more" if master.startswith("local") else "add executors or cores"
        return Check("free slots", "warn", f"{found}: room for only one worker", fix)
    return Check("free slots", "ok", f"{found}: up to numWorkers={slots}")


def judge_settings(settings: Mapping[str, str]) -> Check:
    switched_on = [
        name
        for name in ("spark.dynamicAllocation.enabled", "spark.speculation")
        if settings.get(name, "false").lower() == "true"
    ]
    if switched_on:
        return Check(
            "Spark settings",
            "FAIL",
            f"{' and '.join(switched_on)} can't be used with barrier jobs",
            "; ".join(f"set {name}=false" for name in switched_on),
        )
    secured = [
        name
        for name in ("spark.authenticate", "spark.network.crypto.enabled")
        if settings.get(name, "false").lower() == "true"
    ]
    if secured:
        return Check(
            "Spark settings",
            "warn",
            f"{' and '.join(secured)}: backends on Gloo are refused, as it does not authenticate",
            "use another backend, or unset it on a network that you trust",
        )
    return Check("Spark settings", "ok", "compatible with barrier jobs")


def _session_fix(master: str) -> str:
    if master.startswith("local"):
        return "fix the failed checks above first; SPARK_HOME must be unset or match pyspark"
    return "check the URL, and that this machine and the cluster can reach each other"
