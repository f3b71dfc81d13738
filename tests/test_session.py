"""What `session_builder` promises of the Python workers of its sessions."""

import os

import pytest

pytestmark = pytest.mark.spark


def daemon_of_batches(batches):
    import pyarrow as pa

    for batch in batches:
        yield pa.RecordBatch.from_pydict({"pid": [os.getppid()] * batch.num_rows})


def test_workers_of_rdds_and_of_dataframes_are_forked_from_one_daemon(spark):
    """One that has imported torch: a second one would take seconds, and as much memory again."""
    of_rdds = set(spark.sparkContext.range(4).map(lambda _: os.getppid()).collect())
    frame = spark.range(4).mapInArrow(daemon_of_batches, "pid long")
    of_frames = {row.pid for row in frame.collect()}
    assert of_rdds == of_frames
    assert len(of_rdds) == 1
