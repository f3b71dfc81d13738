"""What `session_builder` promises of the Python workers of its sessions."""

import gc
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


def test_workers_do_not_look_through_their_modules_for_garbage_after_each_task(spark):
    """Spark collects it then: 0.1 s a task where torch is imported, unless the daemon froze it."""

    def looked_at(_):
        import torch
        import torch._dynamo

        import sparkdml.fitting.job

        of_the_daemon = [vars(torch), torch.nn.Module, vars(torch._dynamo)]
        of_the_daemon.append(vars(sparkdml.fitting.job))
        since_the_fork = []
        looked_through = {id(each) for each in gc.get_objects()}
        # Not how many: a worker lives on, and looks through what its earlier tasks imported.
        return [
            sum(id(each) in looked_through for each in of_the_daemon),
            id(since_the_fork) in looked_through,
        ]

    for modules_seen, list_seen in spark.sparkContext.range(4).map(looked_at).collect():
        assert modules_seen == 0
        assert list_seen
