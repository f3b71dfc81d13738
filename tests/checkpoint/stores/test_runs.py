"""Whole runs with real servers as stores: a worker is killed, and the run resumes."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import sparkdml as dml
from sparkdml.testing.faults import FaultAt

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_run import equal, make_estimator

pytestmark = pytest.mark.filterwarnings("ignore:.*Resuming from step.*")


def fit_through_a_fault(rows: Any, checkpoints: dml.Checkpoints, folder: Path) -> Any:
    fault = FaultAt(1, 12, "kill", str(folder))
    fitted = make_estimator(checkpoint=checkpoints, callbacks=[fault]).fit(rows)
    assert [s.outcome for s in checkpoints.lineage().submissions] == ["failed", "finished"]
    return fitted


@pytest.mark.slow
def test_s3_with_the_credentials_of_sparks_hadoop_configuration(
    s3: Any, spark: Any, rows: Any, uninterrupted: Any, tmp_path: Path
) -> None:
    bucket = s3.make_bucket()
    conf = spark._jsc.hadoopConfiguration()  # as spark.hadoop.fs.s3a… in a user's settings
    settings = {
        f"fs.s3a.bucket.{bucket}.access.key": s3.options["key"],
        f"fs.s3a.bucket.{bucket}.secret.key": s3.options["secret"],
        f"fs.s3a.bucket.{bucket}.endpoint": s3.endpoint,
    }
    for key, value in settings.items():
        conf.set(key, value)
    try:
        checkpoints = dml.Checkpoints(f"s3a://{bucket}/runs/1", every=5)
        assert equal(fit_through_a_fault(rows, checkpoints, tmp_path), uninterrupted())
    finally:
        for key in settings:
            conf.unset(key)
    assert any("manifest.json" in name for name in s3.client().find(bucket))


@pytest.mark.slow
def test_through_the_drivers_hadoop(
    spark: Any, rows: Any, uninterrupted: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Workers have no JVM: their parts go through the driver's. Here to Hadoop's local files."""
    from sparkdml.checkpoint.stores.hadoop import HadoopStore
    from sparkdml.checkpoint.stores.places import StoreAccess

    def through_hadoop(self: dml.Checkpoints, session: Any = None) -> StoreAccess:
        return StoreAccess(None, HadoopStore(session or spark, self.path))

    monkeypatch.setattr(dml.Checkpoints, "open", through_hadoop)
    checkpoints = dml.Checkpoints(f"file://{tmp_path}/run", every=5)
    assert equal(fit_through_a_fault(rows, checkpoints, tmp_path), uninterrupted())


def test_hdfs(hdfs: str, rows: Any, uninterrupted: Any, tmp_path: Path) -> None:
    checkpoints = dml.Checkpoints(f"{hdfs}/runs/{uuid.uuid4().hex}", every=5)
    assert equal(fit_through_a_fault(rows, checkpoints, tmp_path), uninterrupted())
