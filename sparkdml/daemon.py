"""A daemon for Spark's Python workers that has already imported torch and its like.

It runs on every executor, named by `spark.python.daemon.module`; Spark forks every Python worker
from it. It must never use CUDA, which does not survive a fork.
"""

import contextlib
import gc
from importlib import import_module

import numpy  # noqa: F401  # imported for the workers that are forked from here
import pyarrow  # noqa: F401
import pyspark.daemon
import torch

if __name__ == "__main__":
    # The first optimizer of a process would import it, which takes a second or more.
    import torch._dynamo  # noqa: F401

    with contextlib.suppress(ImportError):  # pyarrow imports it for its first column, if installed
        import pandas  # noqa: F401
    with contextlib.suppress(ImportError):  # without Horovod, the torch backend is used
        import horovod.torch  # noqa: F401
    # The modules that every fit needs.
    for module in ("comm.torch", "fitting.job", "runtime.worker.main", "strategies.allreduce"):
        import_module(f"sparkdml.{module}")

    # Spark collects garbage in a worker after each task. Modules never become garbage: freezing
    # them saves 0.1 s per collection, and the copies of the pages that it would write to.
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()
