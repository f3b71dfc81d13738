"""Feeds the Training tab of Spark's UI: attaches it, and posts a run's events in batches.

Nothing here can harm a run: all talk with the JVM is on a thread of its own, what waits for it is
bounded, and where there can be no tab one line says why.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from typing import Any

from sparkdml.observe.observers import Event
from sparkdml.observe.ui_batch import EventBatch
from sparkdml.observe.ui_jar import NoTrainingTab, attach

ENABLED = "spark.sparkdml.ui.enabled"
SHORTEST_INTERVAL = 0.5  # each post flushes Spark's event log
LONGEST_INTERVAL = 5.0
CLOSE_SECONDS = 10.0  # a JVM that hangs must not hold up the end of a run

_said: set[str] = set()


class SparkUi:
    """An observer that shows a run in Spark's UI, event log, History Server and metrics."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        self._batch = EventBatch()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._off = False
        self._bridge: Any = None
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="sparkdml-spark-ui", daemon=True)
        self._thread.start()

    def handle(self, rank: int, event: Event) -> None:
        if not self._off:
            with self._lock:
                self._batch.add(rank, event)

    def close(self) -> None:
        """Posts what is left. Spark shows it a moment later, and logs it before it stops."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._switch_off(f"Spark's JVM has not answered for {CLOSE_SECONDS:.0f} s")

    def _work(self) -> None:
        try:
            if not _is_enabled(self._spark):
                self._off = True
                return
            self._bridge = attach(self._spark)
            while not self._closing.wait(self._interval()):
                self._post(final=False)
            self._post(final=True)
        except NoTrainingTab as error:
            self._switch_off(str(error))
        except Exception as error:
            # Whatever py4j raises when the JVM goes away; this thread has nobody to raise it to.
            self._switch_off(f"{type(error).__name__}: {error}")

    def _interval(self) -> float:
        """Twice a second at first, less often in a long run, whose log would grow without need."""
        age = time.monotonic() - self._begun
        return min(max(age / 120, SHORTEST_INTERVAL), LONGEST_INTERVAL)

    def _post(self, final: bool) -> None:
        with self._lock:
            events = self._batch.take(final)
        if events:
            self._bridge.post(json.dumps(_finite(events), allow_nan=False, default=str))

    def _switch_off(self, reason: str) -> None:
        self._off = True
        with self._lock:
            self._batch = EventBatch()
        line = (
            f"no Training tab in the Spark UI; training goes on. {' '.join(reason.split())[:500]}"
        )
        if line not in _said:
            _said.add(line)
            warnings.warn(line, stacklevel=2)


def _is_enabled(spark: Any) -> bool:
    return str(spark.conf.get(ENABLED, "true")).lower() != "false"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, which the tab takes for "not finite"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
