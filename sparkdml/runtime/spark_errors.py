"""Spark's own words about a job that failed before our code could speak, made useful."""

from __future__ import annotations

import re

from sparkdml.errors import SetupError, WorkerError


def explain_spark_error(error: Exception, worker_python: str) -> Exception:
    """A failure of which no worker could speak: it never came as far as our code."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, PySparkException | Py4JError):
        return error  # at the driver itself: a function that can't be pickled, for instance
    text = str(error)
    explained: Exception = WorkerError(-1, "an unknown host", f"Spark ended the job: {text}")
    for line in text.splitlines():
        unreachable = re.search(r"SetupError: (rank \d+ on .* can't reach the driver.*)", line)
        if unreachable is not None:
            explained = SetupError(unreachable[1])
            break
        if "ModuleNotFoundError" in line or "PYTHON_VERSION_MISMATCH" in line:
            explained = SetupError(
                f"the workers' Python ({worker_python}) can't run the job: {line.strip()}. Set "
                "PYSPARK_PYTHON to a Python that has the driver's version, torch, pyarrow and "
                "sparkdml on every host, or ship them with --py-files or --archives"
            )
            break
    explained.__cause__ = error
    return explained
