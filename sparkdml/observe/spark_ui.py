"""Feeds the Training tab of Spark's UI: attaches it, and posts a run's events in batches.

Runs in the driver. `SparkUi` is an observer: the observers' thread hands it events, which it merges
into an `EventBatch` as `observe.events` says, and a thread of its own, which lives as long as the
run, posts them to Spark's JVM through py4j. The same thread loads sparkdml-ui.jar into the JVM,
where it is not loaded yet; the Java object behind the tab belongs to the application, and lives as
long. Nothing here can harm a run: only that thread waits for the JVM, the events that wait for it
are bounded in number, and where there can be no tab one warning says why.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkdml.observe.events import EVENTS
from sparkdml.observe.observers import Event

_CLASS = "io.sparkdml.ui.TrainingUi"


class NoTrainingTab(Exception):
    """The reason why there can't be a Training tab. It never keeps a run from training."""


def jar_path() -> Path:
    """The jar inside the installed package, or in the checkout beside it."""
    package = Path(__file__).parents[1]
    for folder in (package / "jars", package.parent / "jars"):
        if (folder / "sparkdml-ui.jar").is_file():
            return folder / "sparkdml-ui.jar"
    raise NoTrainingTab(f"{package / 'jars' / 'sparkdml-ui.jar'} is missing; reinstall sparkdml")


def attach(spark: Any) -> Any:
    """The Java object that posts events, for this session's application; always the same one."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise NoTrainingTab(
            "Spark Connect gives no access to the driver's JVM; train in a classic session to see "
            "runs in the tab"
        )
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        context = spark.sparkContext
        jvm = context._jvm
        if not _is_loaded(jvm):
            _add_to_class_path(jvm, jar_path())
        return jvm.io.sparkdml.ui.TrainingUi.attach(context._jsc.sc())
    except Py4JJavaError as error:
        raise NoTrainingTab(
            f"sparkdml-ui.jar does not fit Spark {context.version}: {error.java_exception}"
        ) from error
    except PySparkException as error:  # pyspark converts some Java exceptions
        raise NoTrainingTab(
            f"sparkdml-ui.jar does not fit Spark {context.version}: {error}"
        ) from error
    except (Py4JError, TypeError, AttributeError) as error:
        # TypeError: the class isn't there, so py4j took its name for a package.
        raise NoTrainingTab(f"Spark's JVM could not load sparkdml-ui.jar: {error}") from error


def _is_loaded(jvm: Any) -> bool:
    from py4j.protocol import Py4JJavaError

    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        jvm.java.lang.Class.forName(_CLASS, True, loader)
    except Py4JJavaError:  # ClassNotFoundException
        return False
    return True


def _add_to_class_path(jvm: Any, jar: Path) -> None:
    """Add the jar to Spark's own class loader, as --jars does, which is possible at any time."""
    mutable = jvm.java.lang.Class.forName("org.apache.spark.util.MutableURLClassLoader")
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    while loader is not None and not mutable.isInstance(loader):
        loader = loader.getParent()
    if loader is None:
        raise NoTrainingTab(
            f"this JVM can't load a jar after its start. Start it with --jars {jar} "
            "--conf spark.plugins=io.sparkdml.ui.TrainingPlugin"
        )
    loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())


MOST_LOSSES = 100  # a post
MOST_LOSSES_WAITING = 1_000
MOST_LOGS = 200
MOST_EVENTS = 2_000
MERGED_PER_POST = 32


def thin(points: Sequence[Sequence[Any]], most: int) -> list[Sequence[Any]]:
    """At most `most` of the points: of each stretch those with the least and the greatest value.

    A value that isn't a finite number counts as the greatest, so that it is kept.
    """
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most // 2))
    kept: list[Sequence[Any]] = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        ends = {
            min(part, key=lambda i: _height(points[i])),
            max(part, key=lambda i: _height(points[i])),
        }
        kept += [points[i] for i in sorted(ends)]
    return kept


def _height(point: Sequence[Any]) -> float:
    value = point[1]
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.inf


class EventBatch:
    """The events since the last post, of bounded number. Not safe for several threads."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._merged: dict[tuple[str, int], Event] = {}  # by kind and rank
        self._steps: Event | None = None  # the last of _events, where later steps may join it
        self._logs = 0
        self._takes_without_merged = 0

    def add(self, rank: int, event: Event) -> None:
        kind = event["kind"]
        posting = EVENTS[kind].posting if kind in EVENTS else "each"
        if posting == "steps":
            self._add_steps(rank, event)
        elif posting == "sums":
            before = self._merged.get((kind, rank), {})
            sums = {name: _sum(before.get(name), event.get(name)) for name in EVENTS[kind].sums}
            self._merged[kind, rank] = {**event, **sums, "rank": rank}
        elif posting == "newest":
            self._merged[kind, rank] = {**event, "rank": rank}
        elif kind == "log":
            self._logs += 1
            if self._logs <= MOST_LOGS:
                self._append({**event, "rank": rank})
        elif posting == "each":
            self._steps = None  # losses must not move across a restart or the end of an epoch
            self._append({**event, "rank": rank})

    def _append(self, event: Event) -> None:
        if len(self._events) < MOST_EVENTS or event["kind"] == "run-end":
            self._events.append(event)

    def _add_steps(self, rank: int, event: Event) -> None:
        losses = list(event.get("losses", ()))
        before = self._steps
        if before is None or before.get("epoch") != event.get("epoch"):
            self._steps = {**event, "rank": rank, "losses": losses}
            self._append(self._steps)
            return
        gathered = before["losses"] + losses
        if len(gathered) > MOST_LOSSES_WAITING:  # the JVM is slow to take them
            gathered = thin(gathered, MOST_LOSSES_WAITING // 2)
        before.update({**event, "rank": rank, "losses": gathered})

    def take(self, final: bool = False) -> list[Event]:
        """The events to post now. With many ranks, merged events are in every few posts only."""
        events, self._events = self._events, []
        self._steps, self._logs = None, 0
        for event in events:
            if event["kind"] == "steps":
                event["losses"] = thin(event["losses"], MOST_LOSSES)
        self._takes_without_merged += 1
        if final or self._takes_without_merged * MERGED_PER_POST >= len(self._merged):
            # After run-start and before run-end, which is the last event of a run.
            ends = [event for event in events if event["kind"] == "run-end"]
            others = [event for event in events if event["kind"] != "run-end"]
            events = [*others, *self._merged.values(), *ends]
            self._merged = {}
            self._takes_without_merged = 0
        return events


def _sum(before: Any, more: Any) -> Any:
    """Of two numbers, or of two mappings name by name; None counts as nothing."""
    if isinstance(before, dict) or isinstance(more, dict):
        before, more = before or {}, more or {}
        return {name: _sum(before.get(name), more.get(name)) for name in {**before, **more}}
    return (before or 0) + (more or 0)


ENABLED = "spark.sparkdml.ui.enabled"
SHORTEST_INTERVAL = 0.5  # each post flushes Spark's event log
LONGEST_INTERVAL = 5.0
CLOSE_SECONDS = 10.0  # a JVM that hangs must not delay the end of a run for longer

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
        """Post what is left. Spark shows it a moment later, and logs it before it stops."""
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
            # py4j may raise anything when the JVM goes away, and nothing catches it on this thread.
            self._switch_off(f"{type(error).__name__}: {error}")

    def _interval(self) -> float:
        """Half a second at first, longer in a long run, whose event log would grow needlessly."""
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
            "there is no Training tab in the Spark UI; training continues. "
            + " ".join(reason.split())[:500]
        )
        if line not in _said:
            _said.add(line)
            warnings.warn(line, stacklevel=2)


def _is_enabled(spark: Any) -> bool:
    return str(spark.conf.get(ENABLED, "true")).lower() != "false"


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null, which the tab shows as not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
