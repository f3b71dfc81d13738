"""A daemon for Spark's Python workers that has the heavy imports behind it.

Named by `spark.python.daemon.module`; Spark forks every Python worker from it. It must never touch
CUDA, which does not survive a fork.
"""

import contextlib
import gc

import numpy  # noqa: F401  # imported for the workers that are forked from here
import pyarrow  # noqa: F401
import pyspark.daemon
import torch

if __name__ == "__main__":
    # The first optimizer of a process imports it, which takes a second or more.
    import torch._dynamo  # noqa: F401

    with contextlib.suppress(ImportError):  # pyarrow wants it for its first column, if it is there
        import pandas  # noqa: F401
    with contextlib.suppress(ImportError):  # without Horovod, the torch backend serves
        import horovod.torch  # noqa: F401
    # What a fit needs.

    # Spark collects a worker's garbage after each task. Modules never become any, so the workers
    # needn't look through them (0.1 s each time), nor copy the pages that a look would write to.
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()
