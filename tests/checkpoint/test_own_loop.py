"""`dml.run` with a loop of one's own, and checkpoints in the estimator's own files."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import sparkdml as dml

sys.path.insert(0, str(Path(__file__).parent))
from small_run import make_estimator

pytestmark = pytest.mark.filterwarnings("ignore:.*Resuming from step.*")


def test_a_custom_loop_resumes(spark, tmp_path):
    mark = str(tmp_path / "killed")

    def loop(ctx):
        found = ctx.checkpoint.load() or {"total": torch.zeros(2), "mine": 0.0}
        total, mine = found["total"], found["mine"]
        start = ctx.checkpoint.step
        for step in range(start, 30):
            total += ctx.comm.allreduce_(torch.full((2,), float(step)))
            mine += ctx.rank
            if (step + 1) % 10 == 0:
                from sparkdml.checkpoint.state import Entry

                ctx.checkpoint.save(step + 1, {"total": total, "mine": Entry(mine, "sum")})
                ctx.checkpoint.wait()
            if step == 24 and ctx.rank == 1 and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return start, total.tolist(), mine

    place = dml.Checkpoints(f"{tmp_path}/run", keep=None)
    results = dml.run(loop, num_workers=2, checkpoint=place, backend="torch")
    expected = float(sum(range(30)) * 2)
    assert results == [(20, [expected, expected], 0.0), (20, [expected, expected], 30.0)]
    assert [m.step for m in place.lineage().manifests] == [10, 20, 30]


def test_without_checkpoints_there_is_none(spark):
    assert dml.run(lambda ctx: ctx.checkpoint, num_workers=1) == [None]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"checkpoint": 3}, "a path, or dml.Checkpoints"),
        ({"max_restarts": -1}, "max_restarts must be a whole number of at least 0"),
        ({"min_workers": 0}, "min_workers must be a whole number of at least 1"),
        ({"replacement_seconds": -1}, "replacement_seconds must be 0 or more"),
    ],
)
def test_bad_parameters(spark, fields, words):
    with pytest.raises(dml.ParameterError, match=words):
        dml.run(lambda ctx: None, num_workers=1, **fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dml.Checkpoints(""), "path must be a URL or a path"),
        (lambda: dml.Checkpoints("x", every=0), "every must be"),
        (lambda: dml.Checkpoints("x", keep=0), "keep must be"),
        (lambda: dml.Checkpoints("x", resume="yes"), "resume must be 'auto' or 'force'"),
        (lambda: dml.Checkpoints("x", failure_seconds=-1), "failure_seconds must be"),
        (lambda: make_estimator(checkpoint=5), "checkpoint must be a path, or dml.Checkpoints"),
    ],
)
def test_bad_checkpoints_are_refused_where_they_are_made(make, words):
    with pytest.raises(dml.ParameterError, match=words):
        make()


def test_memory_is_refused_before_any_job(rows):
    with pytest.raises(dml.ParameterError, match="that all processes of the run share"):
        make_estimator(checkpoint="memory://run").fit(rows)


def test_two_fits_into_one_place_at_once_are_refused(rows, tmp_path):
    """A callback in the middle of the first fit is the best moment for the second."""
    place = dml.Checkpoints(f"{tmp_path}/run", every=5)
    estimator = make_estimator(checkpoint=place)
    seen = []

    class Second:
        def __call__(self, rank, message):
            if message.get("kind") == "checkpoint" and not seen:
                try:
                    estimator.fit(rows)
                except dml.CheckpointError as error:
                    seen.append(str(error))

    estimator._prepare(rows).train(place, Second())
    assert "another driver" in seen[0]
    assert "is training into" in seen[0]


def test_an_estimator_with_checkpoints_is_saved_and_loaded(spark, tmp_path):
    place = dml.Checkpoints("s3://bucket/run", every="epoch", keep=dml.Keep(best="val_loss"))
    estimator = make_estimator(checkpoint=place, maxRestarts=7, minWorkers=2)
    path = f"{tmp_path}/estimator"
    estimator.write().overwrite().save(path)
    with dml.allow_packages("sparkdml.testing"):
        loaded = dml.TorchEstimator.load(path)
    assert (loaded.getMaxRestarts(), loaded.getMinWorkers()) == (7, 2)
    found = loaded.getCheckpoint()
    assert (found.path, found.every, found.keep) == (place.path, place.every, place.keep)


def test_credentials_are_never_saved(spark, tmp_path):
    place = dml.Checkpoints("s3://bucket/run", storage_options={"secret": "hush"})
    path = f"{tmp_path}/estimator"
    with pytest.warns(UserWarning, match="storage_options of checkpoint= are not saved"):
        make_estimator(checkpoint=place).write().overwrite().save(path)
    assert not any("hush" in f.read_text() for f in Path(path).rglob("*") if f.suffix == ".json")
    assert "hush" not in repr(place)
