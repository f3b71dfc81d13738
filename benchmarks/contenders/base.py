"""The interface of a contender, and what the benchmark gives it to work with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Timer
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import Measurement
from benchmarks.workloads import Allreduce, Training, Workload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class ContenderFailed(RuntimeError):
    """A contender's call failed or took too long; the message says why."""


@dataclass
class Bench:
    """The data folder, the time allowed for one call, and the Spark session once it is needed."""

    cache: Path
    timeout_seconds: float
    _session: Any = None

    @property
    def spark(self) -> SparkSession:
        if self._session is None:
            from benchmarks.session import start_session

            self._session = start_session()
        session: SparkSession = self._session
        return session

    @contextmanager
    def limited_spark_jobs(self) -> Iterator[SparkSession]:
        """The session, with all of its jobs cancelled when the time allowed is over."""
        spark = self.spark
        over = Event()

        def cancel() -> None:
            over.set()
            spark.sparkContext.cancelAllJobs()

        timer = Timer(self.timeout_seconds, cancel)
        timer.start()
        try:
            yield spark
        except Exception as error:
            if not over.is_set():
                raise
            raise ContenderFailed(
                f"no result after {self.timeout_seconds:g} s (--timeout): its jobs were cancelled"
            ) from error
        finally:
            timer.cancel()

    def close(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._session = None


class Contender(ABC):
    """One way to do a workload. A contender that is a package's own API is `packaged`."""

    name: str  # for the command line
    title: str  # for the table
    shuffle: str  # how it mixes the rows, which each does by its own nature
    packaged: bool = False
    ours: bool = False

    @abstractmethod
    def missing(self) -> str | None:
        """What must be installed before this can run here, or None."""

    def does(self, workload: Workload) -> bool:
        return isinstance(workload, Training | Allreduce)

    def warm_up(self, bench: Bench) -> None:  # noqa: B027 - most have nothing to warm
        """An untimed call just before each measured one, where a session can be warm."""

    @abstractmethod
    def measure(self, workload: Workload, bench: Bench) -> Measurement: ...
