"""Runs that fail and go on: with the same bits, or with each row once."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import sparkdml as dml
from sparkdml.errors import CheckpointError, SparkEndedRun, WorkerError
from sparkdml.testing.faults import FaultAt
from sparkdml.testing.models import RecordsRows, WritesRows
from sparkdml.testing.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
from small_run import equal, make_estimator

pytestmark = pytest.mark.filterwarnings("ignore:.*Resuming from step.*")


class Patient(dml.Callback):
    """Waits for the store after each step: on a busy machine no checkpoint is put off then."""

    def on_step_end(self, training):
        training.checkpoint.wait()

    def __repr__(self):
        return "Patient()"


def fit_with_fault(rows, folder, kind, step, every=5, rank=1, times=1, patient=False, **params):
    checkpoints = dml.Checkpoints(f"{folder}/run", every=every)
    fault = FaultAt(rank, step, kind, str(folder), times)
    callbacks = [Patient(), fault] if patient else [fault]
    fitted = make_estimator(checkpoint=checkpoints, callbacks=callbacks, **params).fit(rows)
    return fitted, checkpoints


@pytest.fixture(scope="module")
def given_up(rows, tmp_path_factory):
    """A run that failed for good in its second epoch, at step 33."""
    folder = tmp_path_factory.mktemp("given-up")
    with pytest.raises(WorkerError):
        fit_with_fault(rows, folder, "raise", 33, patient=True, maxRestarts=0)
    return folder


@pytest.fixture(scope="module")
def one_epoch(rows, tmp_path_factory):
    """A run that has ended well."""
    folder = tmp_path_factory.mktemp("one-epoch")
    make_estimator(checkpoint=f"{folder}/run", epochs=1).fit(rows)
    return folder


def copy(folder, to):
    """A run for one test alone, which may damage it."""
    shutil.copytree(folder, to, dirs_exist_ok=True)


def local_directories(spark):
    """Those of this one executor."""
    task = spark.sparkContext.parallelize([0], 1).map(lambda _: os.environ["SPARK_LOCAL_DIRS"])
    return [Path(folder) for folder in task.first().split(",")]


def spools_of(spark):
    return [path for folder in local_directories(spark) for path in folder.glob("sparkdml-spool-*")]


@pytest.mark.parametrize(
    ("kind", "step", "setting"),
    [
        ("kill", 12, {}),  # in the first epoch, which is streamed
        pytest.param("raise", 33, {}, marks=pytest.mark.slow),  # in a shuffled one
        ("stop", 24, {"optimizer": "adam"}),
        pytest.param("kill", 20, {"num_workers": 3}, marks=pytest.mark.slow),
        ("kill", 27, {"num_workers": 3, "optimizer": "adam", "backend": "horovod"}),
        pytest.param("raise", 8, {"backend": "horovod"}, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_after_a_fault(rows, uninterrupted, tmp_path, kind, step, setting):
    expected = uninterrupted(**setting)
    fitted, checkpoints = fit_with_fault(rows, tmp_path, kind, step, **setting)
    assert equal(fitted, expected)
    assert [row["loss"] for row in fitted.history] == [row["loss"] for row in expected.history]
    lineage = checkpoints.lineage()
    assert [s.outcome for s in lineage.submissions] == ["failed", "finished"]
    assert f"rank {1} on" in lineage.submissions[0].cause
    if kind == "raise":
        assert lineage.submissions[0].failed_at_step == step


@pytest.mark.slow
def test_several_faults_in_one_run(rows, uninterrupted, tmp_path):
    faults = [
        FaultAt(rank, step, kind, str(tmp_path))
        for rank, step, kind in (
            (0, 9, "raise"),
            (1, 22, "kill"),
            (0, 22, "kill"),
            (1, 41, "raise"),
        )
    ]
    fitted = make_estimator(
        checkpoint=dml.Checkpoints(f"{tmp_path}/run", every=3), callbacks=faults
    ).fit(rows)
    assert equal(fitted, uninterrupted())
    assert sorted(p.name for p in tmp_path.glob("fault-*")) == [
        "fault-0-22-kill-0",
        "fault-0-9-raise-0",
        "fault-1-22-kill-0",
        "fault-1-41-raise-0",
    ]


def test_the_driver_says_which_rank_failed_and_where_it_resumes(rows, uninterrupted, tmp_path):
    with pytest.warns(
        UserWarning, match=r"rank 1 on \S+ failed: .*Injected.*Resuming from step (5|10)"
    ):
        fitted, _ = fit_with_fault(rows, tmp_path, "raise", 12, patient=True)
    assert equal(fitted, uninterrupted())


def test_a_bug_is_not_retried_indefinitely(spark, rows, tmp_path):
    started = time.monotonic()
    with pytest.raises(WorkerError, match="an injected fault") as caught:
        fit_with_fault(rows, tmp_path, "raise", 12, times=99, maxRestarts=50)
    assert len(list(tmp_path.glob("fault-*"))) == 2
    assert "occurred twice at step 12" in "".join(caught.value.__notes__)
    assert time.monotonic() - started < 60
    assert not spools_of(spark), "spools are removed"


def test_a_failure_before_the_first_step_is_not_tried_again(rows, tmp_path):
    with pytest.raises(WorkerError):
        make_estimator(
            checkpoint=f"{tmp_path}/run", model=torch.nn.Sequential(torch.nn.Linear(9, 2))
        ).fit(rows)
    assert len(dml.Checkpoints(f"{tmp_path}/run").lineage().submissions) == 1


def test_given_up_after_max_restarts_with_the_first_cause(rows, tmp_path):
    with pytest.raises(WorkerError, match="exited without reporting") as caught:
        fit_with_fault(rows, tmp_path, "kill", 3, times=99, maxRestarts=1)
    assert len(list(tmp_path.glob("fault-*"))) == 2
    assert "maxRestarts=1" in "".join(caught.value.__notes__)


def test_a_run_that_was_given_up_resumes_by_hand(rows, uninterrupted, given_up, tmp_path):
    copy(given_up, tmp_path)
    fitted, checkpoints = fit_with_fault(rows, tmp_path, "raise", 33, patient=True)
    assert equal(fitted, uninterrupted())
    lineage = checkpoints.lineage()
    first, second = lineage.submissions
    assert (first.reason, second.reason) == ("start", "resume")
    last = max((m for m in lineage.manifests if m.submission == 1), key=lambda m: m.step)
    assert second.resumed_from == last.id
    assert 0 < last.step <= 33


def test_a_finished_run_is_not_trained_again_but_resumes_for_more_epochs(
    rows, uninterrupted, tmp_path
):
    never = [FaultAt(0, -1, "raise", "")]
    estimator = make_estimator(checkpoint=f"{tmp_path}/run", epochs=2, callbacks=never)
    first = estimator.fit(rows)
    second = estimator.fit(rows)
    assert equal(first, second)
    assert list(second.history) == list(first.history)
    assert second.transform(rows).count() == 600
    submissions = dml.Checkpoints(f"{tmp_path}/run").lineage().submissions
    assert len(submissions) == 1, "nothing was launched"

    fitted = make_estimator(checkpoint=f"{tmp_path}/run", epochs=3, callbacks=never).fit(rows)
    assert equal(fitted, uninterrupted())
    assert [row["epoch"] for row in fitted.history] == [1, 2, 3]
    with pytest.raises(CheckpointError, match=r"trained into epoch 3, and epochs=1"):
        make_estimator(checkpoint=f"{tmp_path}/run", epochs=1, callbacks=never).fit(rows)


def test_another_plan_is_refused_by_name(rows, one_epoch, tmp_path):
    copy(one_epoch, tmp_path)
    with pytest.raises(CheckpointError, match=r"batchSize was 16, is now 8.*resume='force'"):
        make_estimator(checkpoint=f"{tmp_path}/run", epochs=1, batchSize=8).fit(rows)
    with pytest.raises(CheckpointError, match=r"optimizer was torch.*SGD.*is now torch.*Adam"):
        make_estimator(checkpoint=f"{tmp_path}/run", epochs=1, optimizer="adam").fit(rows)
    forced = dml.Checkpoints(f"{tmp_path}/run", resume="force")
    with pytest.warns(UserWarning, match="resuming although batchSize was 16"):
        fitted = make_estimator(checkpoint=forced, epochs=2, batchSize=8).fit(rows)
    assert len(fitted.history) == 2


@pytest.mark.parametrize("epochs", [1, 2])
def test_other_rows_are_refused(rows, one_epoch, tmp_path, epochs):
    """Whether there is something left to train, or the run has ended."""
    copy(one_epoch, tmp_path)
    with pytest.raises(CheckpointError, match=r"rows: 600 before, 500 now"):
        make_estimator(checkpoint=f"{tmp_path}/run", epochs=epochs).fit(rows.limit(500))


def test_fewer_epochs_than_were_begun_are_refused(rows, given_up, tmp_path):
    copy(given_up, tmp_path)
    with pytest.raises(CheckpointError, match=r"trained into epoch 2, and epochs=1"):
        fit_with_fault(rows, tmp_path, "raise", 33, patient=True, epochs=1)


def test_what_even_force_cant_do(rows, one_epoch, tmp_path):
    copy(one_epoch, tmp_path)
    forced = dml.Checkpoints(f"{tmp_path}/run", resume="force")
    for change, words in (
        ({"optimizer": "adam"}, "the optimizers differ in .*betas"),
        ({"callbacks": [FaultAt(0, -1, "raise", "")]}, "state of 0 callbacks, and there are 1"),
    ):
        with (
            pytest.warns(UserWarning, match="resuming although"),
            pytest.raises(CheckpointError, match=words),
        ):
            make_estimator(checkpoint=forced, epochs=2, **change).fit(rows)


def test_rows_from_changed_files_name_the_files(spark, rows, tmp_path):
    path = f"{tmp_path}/rows"
    rows.coalesce(1).write.parquet(path)
    make_estimator(checkpoint=f"{tmp_path}/run", epochs=1).fit(spark.read.parquet(path))
    rows.limit(50).coalesce(1).write.mode("append").parquet(path)
    with pytest.raises(CheckpointError, match=r"rows: 600 before, 650 now.*parquet is new"):
        make_estimator(checkpoint=f"{tmp_path}/run", epochs=2).fit(spark.read.parquet(path))


def test_data_that_is_not_deterministic_is_warned_of(rows, tmp_path):
    from pyspark.sql import functions as F

    shaky = rows.where(F.rand() < 2)
    with pytest.warns(UserWarning, match="not deterministic"):
        make_estimator(checkpoint=f"{tmp_path}/run", epochs=1).fit(shaky)


def leave_slots(monkeypatch, left):
    """Makes the driver see this number of slots after the first submission."""
    from sparkdml.runtime.driver import preflight

    real = preflight.wait_for_replacements

    def wait(*args, **keywords):
        monkeypatch.setattr(preflight, "count_slots", lambda *args: left)
        return real(*args, **keywords)

    monkeypatch.setattr(preflight, "wait_for_replacements", wait)


@pytest.mark.parametrize(("before", "after"), [(3, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_each_row_once_with_another_number_of_workers(spark, rows, tmp_path, before, after):
    from pyspark.sql import functions as F

    numbered = rows.coalesce(1).withColumn("id", F.monotonically_increasing_id()).cache()
    folder = tmp_path / "seen"
    folder.mkdir()
    settings = {
        "model": RecordsRows(8, 2),
        "featuresCol": ["features", "id"],
        "epochs": 2,
        "maxRestarts": 0,
    }
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every=4)
    # In the second epoch, mid-way: 600 rows are 13 steps of 3 workers, 19 of 2.
    step = (13 if before == 3 else 19) + 8
    callbacks = [WritesRows(str(folder)), FaultAt(0, step, "raise", str(tmp_path))]
    with pytest.raises(WorkerError):
        make_estimator(before, checkpoint=checkpoints, callbacks=callbacks, **settings).fit(
            numbered
        )
    start = checkpoints.newest()
    fitted = make_estimator(after, checkpoint=checkpoints, callbacks=callbacks, **settings).fit(
        numbered
    )
    numbered.unpersist()
    assert fitted.history[1]["rows"] == 600
    assert fitted.history[1]["steps"] == pytest.approx(13 if before == 3 else 19, abs=1)
    kept = [  # what was trained behind the checkpoint, before the fault, is trained again
        json.loads(path.read_text())
        for path in folder.iterdir()
        for size, at in [map(int, path.name.split("-")[:2])]
        if (at <= start.step) == (size == before)
    ]
    assert sorted(row for rows in kept for row in rows) == sorted(list(range(600)) * 2)


def test_with_fewer_slots_it_continues_with_those_that_are_left(rows, tmp_path, monkeypatch):
    leave_slots(monkeypatch, 2)
    fitted, checkpoints = fit_with_fault(
        rows, tmp_path, "kill", 20, num_workers=3, replacementSeconds=0.5
    )
    manifests = checkpoints.lineage().line()
    assert [s.num_workers for s in checkpoints.lineage().submissions] == [3, 2]
    assert {m.global_batch for m in manifests} == {48}
    assert [row["rows"] for row in fitted.history] == [600] * 3
    assert [row["steps"] for row in fitted.history] == pytest.approx([13, 13, 13], abs=1)


def test_too_few_left_says_so(rows, tmp_path, monkeypatch):
    from sparkdml.errors import NotEnoughSlots

    leave_slots(monkeypatch, 1)
    with pytest.raises(NotEnoughSlots, match=r"replacementSeconds=0\.5.*it will resume"):
        fit_with_fault(rows, tmp_path, "kill", 9, replacementSeconds=0.5, minWorkers=2)


@pytest.mark.slow
def test_early_stopping_survives_a_restart(rows, tmp_path):
    def fit(folder, step):
        return make_estimator(
            epochs=6,
            batchSize=15,
            validation=0.2,
            checkpoint=dml.Checkpoints(f"{folder}/run", every=4),
            callbacks=[
                dml.EarlyStopping("val_loss", patience=0, min_delta=0.05, restore_best=True),
                FaultAt(1, step, "raise", str(folder)),
            ],
        ).fit(rows)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, faulty = fit(tmp_path / "a", -1), fit(tmp_path / "b", 21)
    assert plain.history.stopped is not None
    assert faulty.history.stopped == plain.history.stopped
    assert equal(plain, faulty)


@pytest.mark.parametrize("damage", ["flip", pytest.param("missing", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_passed_over_for_its_parent(
    rows, uninterrupted, given_up, tmp_path, damage
):
    copy(given_up, tmp_path)
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every=5)
    newest = checkpoints.newest()
    folder = tmp_path / "run" / "checkpoints" / newest.id
    part = folder / "state.safetensors"
    if damage == "flip":
        content = bytearray(part.read_bytes())
        content[-7] ^= 16
        part.write_bytes(content)
    else:
        part.unlink()
    with pytest.warns(UserWarning, match=f"skipping damaged checkpoint {newest.id}"):
        fitted, _ = fit_with_fault(rows, tmp_path, "raise", 33, patient=True)
    assert equal(fitted, uninterrupted())
    resumed = checkpoints.lineage().submissions[-1]
    assert resumed.resumed_from == newest.parent
    assert folder.exists(), "nothing is deleted that can't be replaced"


def test_replay_gives_the_state_of_any_step(rows, uninterrupted, tmp_path):
    never = [FaultAt(0, -1, "raise", "")]
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every=10, keep=None)
    estimator = make_estimator(checkpoint=checkpoints, callbacks=never)
    fitted = estimator.fit(rows)
    before = [p.name for p in (tmp_path / "run").rglob("*")]
    near = checkpoints.replay(33, estimator, rows)
    steps = [checkpoint.step for checkpoint in checkpoints.lineage().line()]
    nearest = max(step for step in steps if step <= 33)  # 30, or later if a disk was busy then
    assert (near.step, near.from_step) == (33, nearest)
    assert list(near.losses) == list(range(nearest + 1, 34))
    last = steps[-1]
    end = checkpoints.replay(last, estimator, rows)
    assert all(
        torch.equal(p, q)
        for p, q in zip(end.module.parameters(), fitted.module.parameters(), strict=True)
    )
    assert [p.name for p in (tmp_path / "run").rglob("*")] == before, "a replay writes nothing"
    with pytest.raises(dml.ParameterError, match=f"0 to {last}"):
        checkpoints.replay(last + 1, estimator, rows)


def test_what_cant_be_saved_fails_at_step_0(rows, tmp_path):
    class Unsavable(dml.Callback):
        def state(self):
            return {"file": open}

    with pytest.raises(CheckpointError, match=r"callbacks.0.file.*no checkpoint can hold"):
        make_estimator(checkpoint=f"{tmp_path}/run", callbacks=[Unsavable()]).fit(rows)


def test_a_place_that_is_not_shared_is_found_out_before_training(rows, tmp_path, monkeypatch):
    from sparkdml.runtime.driver import checkpointed_run as checkpoint_run

    monkeypatch.setattr(
        checkpoint_run.CheckpointedRun, "_write_probe", lambda self, name: None, raising=True
    )
    with pytest.raises(dml.SetupError, match=r"not shared by all hosts"):
        make_estimator(checkpoint=f"{tmp_path}/run").fit(rows)


@pytest.mark.parametrize("here", [False, True])
def test_spools_are_removed_by_tasks(spark, here):
    from sparkdml.runtime.driver.spools import Spools

    spools = Spools()
    for rank in range(2):
        folder = local_directories(spark)[0] / f"sparkdml-spool-{rank}"
        folder.mkdir()
        (folder / "rows").write_bytes(b"x")
        spools.note(rank, {"host": "a", "name": folder.name, "whole": True}, 2)
    spools.left_behind()
    spools.remove_left(spark, here)
    assert not spools_of(spark)


def test_surviving_spools_are_used_again(spark, rows, tmp_path):
    """The upstream counts its own computations: the second submission makes none."""
    from pyspark.sql import functions as F

    computed = spark.sparkContext.accumulator(0)

    @F.udf("bigint")
    def counted(label):
        computed.add(1)
        return label

    fed = rows.select("features", counted("label").alias("label"))
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every=5)
    fault = FaultAt(1, 33, "kill", str(tmp_path))
    make_estimator(checkpoint=checkpoints, callbacks=[fault]).fit(fed)
    assert len(checkpoints.lineage().submissions) == 2
    assert computed.value == 600
    assert not spools_of(spark)


class RemovesCheckpoints(dml.Callback):
    """Removes the checkpoints' folder; then its process is killed."""

    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def on_step_end(self, training):
        if training.ctx.rank == 0 and training.step == self.step:
            training.checkpoint.wait()
            shutil.rmtree(self.folder)
            os.kill(os.getpid(), signal.SIGKILL)

    def __repr__(self):
        return "RemovesCheckpoints()"


def test_a_folder_that_was_removed_in_mid_run_is_told_as_that(rows, tmp_path):
    folder = f"{tmp_path}/run"
    checkpoints = dml.Checkpoints(folder, every=50)
    with pytest.raises(CheckpointError, match=r"folder .*/run was removed while") as caught:
        make_estimator(checkpoint=checkpoints, callbacks=[RemovesCheckpoints(folder, 12)]).fit(rows)
    assert isinstance(caught.value.__cause__, dml.WorkerLost)


def test_the_spool_of_a_worker_that_spark_started_again_is_removed(rows, spark, tmp_path):
    checkpoints = dml.Checkpoints(f"{tmp_path}/run", every="epoch")
    fault = FaultAt(1, 12, "kill", str(tmp_path))
    estimator = make_estimator(checkpoint=checkpoints, callbacks=[fault])
    estimator.setStrategy(dml.ParameterServer(num_servers=1)).fit(rows)
    assert list(tmp_path.glob("fault-*"))
    assert len(checkpoints.lineage().submissions) == 1, "Spark started it again, not the driver"
    assert not spools_of(spark)


class CancelsAllJobs(dml.Callback):
    """Has the driver's Spark cancel all jobs, as its UI does, after a step."""

    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def on_step_end(self, training):
        if training.ctx.rank == 0 and training.step == self.step:
            Path(self.folder, "cancel").touch()
            time.sleep(60)

    def __repr__(self):
        return "CancelsAllJobs()"


@pytest.mark.parametrize("checkpoints", [True, False])
def test_cancelling_all_jobs_in_spark_ends_a_run(rows, spark, tmp_path, checkpoints):
    def cancel():
        wait_until((tmp_path / "cancel").exists, seconds=120)
        spark.sparkContext.cancelAllJobs()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    setting = {"checkpoint": f"{tmp_path}/run"} if checkpoints else {}
    with pytest.raises(SparkEndedRun, match=r"cancelled in Spark: Job \d+ cancelled"):
        make_estimator(callbacks=[CancelsAllJobs(str(tmp_path), 12)], **setting).fit(rows)
    canceller.join()
    if checkpoints:
        assert len(dml.Checkpoints(f"{tmp_path}/run").lineage().submissions) == 1
