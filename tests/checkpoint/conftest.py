"""The rows of the small run, and what comes of it without a fault."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_run import make_estimator, make_rows


@pytest.fixture(scope="session")
def rows(spark):
    df = make_rows(spark).cache()
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
