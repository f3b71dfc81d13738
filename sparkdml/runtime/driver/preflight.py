"""Checks before any job is submitted: slots, Spark's settings, the workers' Python.

Runs at the driver, on the caller's thread; asks the SparkContext of a classic session, or only its
settings where a `Setting` is given.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sparkdml.errors import NotEnoughSlots, ParameterError, SetupError
from sparkdml.runtime.protocol.plan import Resources

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile


_OPEN_WIRES_REFUSED = (
    "spark.authenticate",
    "spark.network.crypto.enabled",
    "spark.ssl.rpc.enabled",
)
_CHECKED = (
    "spark.dynamicAllocation.enabled",
    "spark.speculation",
    "spark.io.encryption.enabled",
    *_OPEN_WIRES_REFUSED,
)
BLOB_BYTES = 64 << 20  # larger objects bypass Spark's channels

Setting = Callable[[str], str | None]


def is_local(sc: SparkContext) -> bool:
    """Whether driver and workers are one machine and one JVM: `local`, `local[n]`."""
    return sc.master == "local" or str(sc.master).startswith("local[")


def session_setting(sc: SparkContext, key: str) -> str | None:
    """One of the session's settings, asked for alone.

    `sc.getConf()` copies all of them, one by one, from the JVM and back: some 30 ms each time.
    """
    return sc._conf.get(key)


def driver_host(sc: SparkContext) -> str:
    """The address at which workers reach the driver, and the only one that is listened on."""
    return "127.0.0.1" if is_local(sc) else session_setting(sc, "spark.driver.host") or "127.0.0.1"


def read_settings(setting: Setting) -> dict[str, str]:
    """Those that are checked before a run."""
    found = {key: setting(key) for key in _CHECKED}
    return {key: value for key, value in found.items() if value is not None}


def must_encrypt_wires(setting: Setting) -> bool:
    settings = read_settings(setting)
    return any(_is_true(settings, key) for key in _OPEN_WIRES_REFUSED)


def must_encrypt_disks(setting: Setting) -> bool:
    """Whether nothing may be written as it is; what Spark itself writes is encrypted then."""
    return _is_true(read_settings(setting), "spark.io.encryption.enabled")


def blob_threshold(setting: Setting) -> int | None:
    """The size in bytes from which blobs bypass Spark's channels; None where they never may.

    A result must stay well below spark.driver.maxResultSize, which counts those of all tasks.
    """
    if must_encrypt_wires(setting) or must_encrypt_disks(setting):
        return None
    limit = _bytes(setting("spark.driver.maxResultSize") or "1g")
    return min(BLOB_BYTES, limit // 16) if limit else BLOB_BYTES


def _bytes(text: str) -> int:
    """A size as Spark writes it: "1g", "512m", "0" for no limit, plain bytes."""
    found = re.fullmatch(r"\s*(\d+)\s*([kmgtp]?)b?\s*", text.lower())
    if found is None:
        return 1 << 30  # Spark itself will say what is wrong with it
    return int(found[1]) << (10 * " kmgtp".index(found[2] or " "))


def check_settings(conf: dict[str, str], *, many: bool, spools: bool, gang: bool = True) -> None:
    """Settings that would break a gang of tasks, or that we can't honour."""
    if gang and _is_true(conf, "spark.dynamicAllocation.enabled"):
        raise SetupError(
            "spark.dynamicAllocation.enabled is true, and Spark refuses barrier stages under it "
            "(SPARK-24942). Start the session with spark.dynamicAllocation.enabled=false and a "
            "fixed spark.executor.instances"
        )
    if _is_true(conf, "spark.speculation"):
        raise SetupError(
            "spark.speculation is true: a worker that Spark finds slow would run a second time "
            "beside itself. Start the session with spark.speculation=false"
        )
    for key in _OPEN_WIRES_REFUSED:
        if many and _is_true(conf, key):
            raise SetupError(
                f"{key} is true, but neither Horovod's nor torch's Gloo sockets authenticate or "
                "encrypt, so the workers' traffic would be readable. Use a cluster whose network "
                f"is trusted and where {key} is false, or num_workers=1"
            )
    if spools and _is_true(conf, "spark.io.encryption.enabled"):
        raise SetupError(
            "spark.io.encryption.enabled is true, but the workers' spool on local disk is not "
            "encrypted. Use a session where it is false, or encrypt the disk itself"
        )


def check_relay(conf: dict[str, str], needs_relay: bool, url: str) -> None:
    """The relay asks for a token, but its bytes are not encrypted."""
    for key in _OPEN_WIRES_REFUSED:
        if needs_relay and _is_true(conf, key):
            raise SetupError(
                f"{key} is true, but checkpoints in {url} go from the workers to the driver "
                "without encryption. Use a store that workers reach by themselves (s3://…, a "
                f"shared disk), or a session where {key} is false"
            )


def _is_true(conf: dict[str, str], key: str) -> bool:
    return conf.get(key, "false").strip().lower() == "true"


def check_worker_python(sc: SparkContext) -> None:
    """In local mode, ask the workers' Python what it has; elsewhere the job itself will tell."""
    if is_local(sc) and sc.pythonExec != sys.executable:
        problem = _python_problem(sc.pythonExec, sys.version_info[:2])
        if problem:
            raise SetupError(
                f"workers would run {sc.pythonExec!r}, {problem}. Set PYSPARK_PYTHON="
                f"{sys.executable} before the session starts, or build it with "
                "sparkdml.session_builder()"
            )


@functools.cache
def _python_problem(executable: str, version: tuple[int, int]) -> str | None:
    code = (
        "import sys, importlib.util as u; print(*sys.version_info[:2], "
        "*[m for m in ('torch', 'pyarrow', 'pyspark', 'sparkdml') if u.find_spec(m) is None])"
    )
    try:
        done = subprocess.run(
            [executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"which can't be run ({error})"
    major, minor, *missing = done.stdout.split()
    if (int(major), int(minor)) != version:
        return f"which is Python {major}.{minor}, while the driver is {version[0]}.{version[1]}"
    # pyspark and an uninstalled sparkdml reach workers through Spark's own Python path.
    missing = [name for name in missing if name in ("torch", "pyarrow")]
    return f"which has no {' and no '.join(missing)}" if missing else None


def task_profile(sc: SparkContext, resources: Resources) -> ResourceProfile | None:
    """A stage-level profile where a task needs more than the session's own settings give it."""
    cpus = int(session_setting(sc, "spark.task.cpus") or 1)
    gpus = float(session_setting(sc, "spark.task.resource.gpu.amount") or 0)
    if is_local(sc) or (resources.cpus <= cpus and resources.gpus <= gpus):
        return None  # local mode has no stage-level scheduling; threads are set all the same
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(max(cpus, resources.cpus))
    if resources.gpus:
        requests = requests.resource("gpu", resources.gpus)
    builder: Any = ResourceProfileBuilder()
    profile: ResourceProfile = builder.require(requests).build
    return profile


def count_slots(sc: SparkContext, resources: Resources, profile: ResourceProfile | None) -> int:
    """How many such tasks could run at once on the executors that are there now."""
    jsc: Any = sc._jsc.sc()
    profiles = jsc.resourceProfileManager()
    if profile is None:
        slots = int(jsc.maxNumConcurrentTasks(profiles.resourceProfileFromId(0)))
        if is_local(sc):
            cores = slots * int(session_setting(sc, "spark.task.cpus") or 1)
            return cores // max(1, resources.cpus)
        return slots
    java_profile: Any = profile._java_resource_profile
    profiles.addResourceProfile(java_profile)
    return int(jsc.maxNumConcurrentTasks(java_profile))


def wait_for_slots(
    sc: SparkContext,
    needed: int | None,
    resources: Resources,
    profile: ResourceProfile | None,
    timeout_seconds: float,
    who: str | None = None,
) -> int:
    """The number of tasks to launch: `needed`, or all slots. Waits while executors register."""
    if needed is not None and needed < 1:
        raise ParameterError("num_workers", needed, "at least 1, or None for all slots")
    deadline = time.monotonic() + (0 if is_local(sc) else timeout_seconds)
    while (slots := count_slots(sc, resources, profile)) < (needed or 1):
        if time.monotonic() >= deadline:
            raise NotEnoughSlots(
                _too_few(
                    sc,
                    needed or 1,
                    slots=slots,
                    resources=resources,
                    timeout_seconds=timeout_seconds,
                    who=who,
                )
            )
        time.sleep(0.2)
    return needed if needed is not None else slots


def wait_for_replacements(
    sc: SparkContext,
    wanted: int,
    least: int,
    resources: Resources,
    profile: ResourceProfile | None,
    timeout_seconds: float,
) -> int:
    """After a failure: as many workers as before if slots are free in time, else those left."""
    deadline = time.monotonic() + timeout_seconds
    while (slots := count_slots(sc, resources, profile)) < wanted:
        if time.monotonic() >= deadline:
            if slots < least:
                raise NotEnoughSlots(
                    f"{slots} slots are left for at least {least} workers, and no executor was "
                    f"replaced within replacementSeconds={timeout_seconds:g}. Lower minWorkers, or "
                    "start the run again when the cluster has recovered: it will resume"
                )
            return slots
        time.sleep(0.2)
    return wanted


def _too_few(
    sc: SparkContext,
    needed: int,
    slots: int,
    resources: Resources,
    timeout_seconds: float,
    who: str | None,
) -> str:
    each = f"{resources.cpus} CPU" + (f" and {resources.gpus} GPU" if resources.gpus else "")
    message = (
        f"{who or f'{needed} workers'} (with {each} each) need {needed} slots, but {sc.master} has "
        f"{slots}"
    )
    if is_local(sc):
        cores = needed * resources.cpus
        fewer = f"num_workers={max(1, slots)}" if who is None else "fewer workers"
        return f"{message}. Use {fewer}, or master local[{cores}]"
    return (
        f"{message} after slotTimeout={timeout_seconds:g} s. Ask for fewer workers, start more "
        "executors (spark.executor.instances, spark.cores.max), or raise slotTimeout"
    )
