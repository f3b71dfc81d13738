"""The rows of the small run, and what comes of it without a fault."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_run import make_estimator


@pytest.fixture(scope="session")
def rows(spark):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(600, 8)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype(int)
    data = [(x.tolist(), int(y)) for x, y in zip(inputs, labels, strict=True)]
    df = spark.createDataFrame(data, "features array<float>, label bigint").repartition(3).cache()
    df.count()
    yield df
    df.unpersist()


@pytest.fixture(scope="session")
def uninterrupted(rows):
    """Models that were trained without a fault, by (workers, optimizer, backend)."""
    from sparkdml.testing.faults import FaultAt

    known = {}

    def fit(num_workers=2, optimizer="momentum", backend="torch"):
        key = (num_workers, optimizer, backend)
        if key not in known:
            never = FaultAt(0, -1, "raise", "")
            known[key] = make_estimator(*key, callbacks=[never]).fit(rows)
        return known[key]

    return fit
