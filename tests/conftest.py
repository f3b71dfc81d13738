"""One Spark session for all tests, and a watch on what tests leave behind."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Whether a commit passes must depend neither on chance nor on how fast the machine is just now.
# `pytest --hypothesis-profile=search` looks for new examples.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", patient)
settings.register_profile("suite", patient, derandomize=True)
settings.load_profile("suite")

os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["PYSPARK_PYTHON"] = sys.executable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n`, one process runs all tests of the Spark session, so that there is one."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Four slots, so that runs of up to four workers fit; each task may fail four times."""
    import sparkdml as dml

    session = (
        dml.session_builder("sparkdml-tests", "local[4,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.memory", "3g")
        # Short jobs spend more on the JVM's second compiler than they get from it.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        # How long Spark waits before it kills a cancelled task's Python process: 2 s by default,
        # in each of the tests in which something fails.
        .config("spark.python.task.killTimeout", "200ms")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A module that a test makes has the same weights in every run, whatever ran before."""
    import torch

    torch.manual_seed(7)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test leaves the environment and our own threads as it found them."""
    before, threads_before = dict(os.environ), set(threading.enumerate())
    yield
    # Frameworks set variables of their own when first imported: only those of a run count.
    changed = {
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name)
        and name.split("_")[0] in ("HOROVOD", "RANK", "WORLD", "MASTER", "LOCAL", "GLOO")
    }
    assert not changed, f"the test left environment variables behind: {sorted(changed)}"
    ours = [
        thread
        for thread in set(threading.enumerate()) - threads_before
        if thread.name.startswith("sparkdml-")
    ]
    for thread in ours:
        thread.join(timeout=5)
    left = [thread.name for thread in ours if thread.is_alive()]
    assert not left, f"the test left threads behind: {left}"
