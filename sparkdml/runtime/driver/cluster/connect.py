"""A Spark Connect session: the driver is another process, perhaps on another machine.

This process stays the one that the workers report to. Slots can't be counted from here, so a small
barrier job asks for them: it also finds out whether the workers reach this process and can import
sparkdml, before the data is computed.
"""

from __future__ import annotations

import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from sparkdml.errors import NotEnoughSlots, ParameterError, SetupError
from sparkdml.network.connection import address_towards
from sparkdml.network.listener import bind
from sparkdml.network.timeouts import CONNECT_PROBE_SECONDS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from sparkdml.runtime.protocol.plan import Resources

HOST_SETTING = "spark.sparkdml.driver.host"
CANNOT_REACH = "sparkdml-unreachable"


class ConnectCluster:
    """Asks the session's configuration, and the workers themselves."""

    reports_facts = False
    shares_disks = False

    def __init__(self, spark: SparkSession) -> None:
        self._spark: Any = spark
        self.worker_python = "of the Spark Connect server's workers"

    def setting(self, key: str) -> str | None:
        value: str | None = self._spark.conf.get(key, None)
        return value

    def driver_host(self) -> str:
        """The address of this machine that faces the server, unless a setting names another."""
        named = self.setting(HOST_SETTING)
        if named:
            return named
        server = str(self._spark.client.host)
        address = _address_towards(server)
        if not address.startswith("127.") or self._is_local():
            return address
        # A server on this machine, with workers on others: they reach it where its driver listens.
        driver = self.setting("spark.driver.host") or address
        return driver if _is_own(driver) else address

    def task_cpus(self) -> int:
        return int(self.setting("spark.task.cpus") or 1)

    def check_worker_python(self) -> None:
        """The probe of the slots finds out."""

    def task_profile(self, resources: Resources) -> ResourceProfile | None:
        cpus = self.task_cpus()
        gpus = float(self.setting("spark.task.resource.gpu.amount") or 0)
        if resources.gpus > gpus:
            raise SetupError(
                f"gpusPerWorker={resources.gpus} on Spark Connect needs a server that was started "
                "with spark.task.resource.gpu.amount and spark.executor.resource.gpu.amount: a "
                "profile of resources for one stage needs a classic session"
            )
        if resources.cpus > cpus and not self._is_local():
            raise SetupError(
                f"cpusPerWorker={resources.cpus} on Spark Connect needs a server that was started "
                f"with spark.task.cpus={resources.cpus}: a profile of resources for one stage "
                "needs a classic session"
            )
        return None

    def wait_for_slots(
        self,
        needed: int | None,
        resources: Resources,
        profile: ResourceProfile | None,
        timeout_seconds: float,
        who: str | None = None,
        gang: bool = True,
    ) -> int:
        if needed is None:
            raise ParameterError(
                "num_workers",
                None,
                "given on Spark Connect, which does not tell how many slots the cluster has",
                "Pass numWorkers= (TorchEstimator) or num_workers= (dml.run)",
            )
        if needed < 1:
            raise ParameterError("num_workers", needed, "at least 1")
        local = re.fullmatch(r"local\[(\d+)(,\d+)?\]", self.setting("spark.master") or "")
        if local is not None and int(local[1]) < needed * resources.cpus:
            raise NotEnoughSlots(
                f"{who or f'{needed} workers'} with {resources.cpus} CPU each need "
                f"{needed * resources.cpus} slots, but the server's master is {local[0]}"
            )
        self._probe(needed, timeout_seconds, gang)
        return needed

    def wait_for_replacements(
        self,
        wanted: int,
        least: int,
        resources: Resources,
        profile: ResourceProfile | None,
        timeout_seconds: float,
    ) -> int:
        """As many as before, or half as many, and so on: only a gang that starts was possible."""
        count = wanted
        while True:
            try:
                self._probe(count, timeout_seconds)
            except NotEnoughSlots:
                if count <= least:
                    raise
                count = max(least, count // 2)
            else:
                return count

    def thread(self, target: Callable[[], None], group: str, name: str) -> threading.Thread:
        def submit() -> None:
            self._spark.addTag(group)  # tags belong to a thread
            target()

        return threading.Thread(target=submit, name=group, daemon=True)

    def cancel(self, group: str) -> None:
        self._spark.interruptTag(group)

    def _is_local(self) -> bool:
        """Whether the workers are processes of the server's own machine."""
        return (self.setting("spark.master") or "").partition("[")[0] == "local"

    def kill_task(self, task_id: int) -> bool:
        return False  # a client has no way to end a single task

    def _probe(self, count: int, timeout_seconds: float, gang: bool = True) -> None:
        """Run `count` tasks that each try to reach this process, as a gang if the run needs one."""
        host, group = self.driver_host(), f"sparkdml-probe-{uuid.uuid4()}"
        failure: list[Exception] = []
        with _listener(host) as server:
            port = server.getsockname()[1]
            rows = self._spark.range(0, count, 1, numPartitions=count)
            query = rows.mapInArrow(partial(_reach, host, port), "id long", barrier=gang)

            def submit() -> None:
                try:
                    query.collect()
                except Exception as error:
                    failure.append(error)

            thread = self.thread(submit, group, "sparkdml: probe")
            thread.start()
            thread.join(max(timeout_seconds, 1.0))
            if thread.is_alive():
                self.cancel(group)
                thread.join(10)
                raise NotEnoughSlots(
                    f"{count} workers could not start at once within "
                    f"slotTimeout={timeout_seconds:g} s: the cluster has fewer slots, or other "
                    "jobs hold them. Ask for fewer workers, or raise slotTimeout"
                )
        if failure:
            raise _explain(failure[0], host)


def _reach(host: str, port: int, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a worker."""
    import sparkdml.runtime.worker  # noqa: F401  # and with it torch: or the error is told early

    for _ in rows:
        pass
    try:
        socket.create_connection((host, port), timeout=CONNECT_PROBE_SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"{CANNOT_REACH}: {socket.gethostname()}: {error}") from error
    yield from ()


def _listener(host: str) -> socket.socket:
    try:
        return bind(host)
    except OSError as error:
        raise SetupError(
            f"this process can't listen on {host!r}: {error}. Set {HOST_SETTING} to an address of "
            f"this machine that the workers can reach: spark.conf.set({HOST_SETTING!r}, …)"
        ) from error


def _explain(error: Exception, host: str) -> Exception:
    from sparkdml.runtime.driver.failures import explain_spark_error

    text = str(error)
    found = re.search(rf"{CANNOT_REACH}: ([^\n]*)", text)
    if found is None:
        return explain_spark_error(error, "of the Spark Connect server's workers")
    unreachable = SetupError(
        f"the workers can't reach this process, the Spark Connect client, at {host} "
        f"({found[1]}). Training needs that: open this machine's ports to the workers, name "
        f"another of its addresses with spark.conf.set({HOST_SETTING!r}, …), or run the script in "
        "the cluster, by spark-submit"
    )
    unreachable.__cause__ = error
    return unreachable


def _address_towards(server: str) -> str:
    """The address that this machine uses on the way to the server."""
    found = address_towards(server)
    return "127.0.0.1" if found is None or found == "::1" else found


def _is_own(host: str) -> bool:
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return any(
        entry.address == address
        for addresses in psutil.net_if_addrs().values()
        for entry in addresses
    )
