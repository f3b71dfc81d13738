"""When a failed run is worth another try, and who sits where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdml.errors import (
    CheckpointError,
    DataError,
    NonFiniteLoss,
    SetupError,
    SparkEndedRun,
    StoreError,
    WorkerError,
    WorkerLost,
)
from sparkdml.runtime.driver.failures import Restarts, ended_by_spark, with_spark_report
from sparkdml.runtime.driver.spools import Spools
from sparkdml.runtime.protocol.kept_spools import KeptSpool, assign_ranks


def raised(reason, step):
    error = WorkerError(1, "here", reason)
    error.step = step
    return error


LOST = WorkerLost(1, "here", "gone")


def test_lost_workers_are_replaced_as_long_as_there_is_progress():
    restarts = Restarts(max_restarts=1)
    for newest in (10, 20, 30, 40):
        assert restarts.why_not(LOST, newest, 0) is None
    assert "maxRestarts=1" in restarts.why_not(LOST, 40, 40)
    assert restarts.total == 5


def test_the_first_cause_since_the_last_progress_is_kept():
    restarts = Restarts(max_restarts=5)
    first, second, third = (WorkerLost(0, "here", str(n)) for n in range(3))
    restarts.why_not(first, 10, 0)
    restarts.why_not(second, 10, 10)
    assert restarts.first_cause is first
    restarts.why_not(third, 20, 10)
    assert restarts.first_cause is third


def test_the_same_exception_twice_at_one_step_is_a_bug():
    restarts = Restarts(max_restarts=50)
    assert restarts.why_not(raised("ValueError: x", 12), 10, 0) is None
    assert restarts.why_not(raised("ValueError: x", 13), 10, 10) is None
    assert restarts.why_not(raised("KeyError: y", 12), 10, 10) is None
    assert "twice at step 12" in restarts.why_not(raised("ValueError: x", 12), 10, 10)


def test_a_first_submission_that_made_no_step():
    for error in (raised("ValueError: shapes", 0), SetupError("no module")):
        assert "before its first step" in Restarts(9).why_not(error, -1, 0)
    assert Restarts(9).why_not(LOST, -1, 0) is None


def test_steps_that_were_saved_count_whichever_task_reports_the_failure():
    by_spark = WorkerError(-1, "an unknown host", "Spark ended the job: heartbeat timed out")
    by_server = WorkerError(1, "here", "CommunicationError: 2 servers were lost", role="server")
    by_server.step = 0  # a server's process counts none
    for error in (by_spark, by_server, raised("ValueError: x", 0)):
        restarts = Restarts(2)
        assert restarts.why_not(error, 250, 0) is None
        assert "before its first step" in Restarts(9).why_not(by_spark, -1, 0)
    assert Restarts(9).why_not(by_server, 0, 0) is None, "other processes died, before a step"
    restarts = Restarts(2)
    for newest in (10, 10, 20, 20):
        assert restarts.why_not(by_server, newest, 0) is None
    assert "maxRestarts=2" in restarts.why_not(by_server, 20, 20)


def test_the_final_error_has_all_failures_since_the_last_progress():
    restarts = Restarts(max_restarts=1)
    error = raised("ValueError: x", 0)
    refusal = restarts.why_not(error, -1, 0)
    assert restarts.explain(error, refusal).__notes__ == [f"Given up after 1 failure: {refusal}."]
    restarts = Restarts(max_restarts=1)
    failures = [WorkerLost(0, "here", f"loss {n}") for n in range(3)]
    for newest, failure in zip((10, 20, 20), failures, strict=True):
        refusal = restarts.why_not(failure, newest, 0)
    final = restarts.explain(failures[2], refusal)
    assert final is failures[1], "the first since step 20"
    given_up, listed = final.__notes__
    assert given_up.startswith("Given up after 3 failures: 2 failures without a new checkpoint")
    assert "loss 1" in listed
    assert "loss 2" in listed
    assert "loss 0" not in listed


@pytest.mark.parametrize(
    "error", [DataError("x"), NonFiniteLoss(1.0, 1, 1, 0), CheckpointError("x"), OSError("x")]
)
def test_what_is_certain_to_come_again(error):
    assert Restarts(9).why_not(error, 10, 0) == "another attempt would fail in the same way"


def test_a_store_may_recover():
    restarts = Restarts(9)
    restarts.why_not(LOST, 10, 0)
    assert restarts.why_not(StoreError("unreachable"), 10, 10) is None


@given(
    hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=7),
    spooled=st.dictionaries(st.integers(0, 6), st.sampled_from("abc")),
)
def test_every_rank_is_assigned_once(hosts, spooled):
    spooled = {rank: host for rank, host in spooled.items() if rank < len(hosts)}
    ranks = assign_ranks(hosts, spooled)
    assert sorted(ranks) == list(range(len(hosts)))
    for partition, rank in enumerate(ranks):
        if rank not in spooled:
            assert rank == partition, "its rows come from Spark, to that partition"


def test_ranks_sit_where_their_spools_are():
    assert assign_ranks(["a", "b", "b"], {0: "b", 1: "a", 2: "b"}) == [1, 0, 2]
    assert assign_ranks(["a", "b", "b"], {0: "b", 2: "b"}) in ([0, 1, 2], [2, 1, 0])


def test_spools_serve_only_as_many_workers_as_before():
    spools = Spools()
    told = {"host": "a", "name": "sparkdml-spool-x", "whole": False}
    spools.note(0, told, 2)
    assert spools.usable(2) == {}
    spools.note(0, {**told, "whole": True}, 2)
    assert spools.usable(2) == {0: KeptSpool("a", "sparkdml-spool-x")}
    assert spools.usable(3) == {}
    spools.left_behind()
    assert spools.stale() == ()
    spools.lost(0)
    assert spools.stale() == ("sparkdml-spool-x",)
    assert spools.usable(2) == {}
    assert spools.num_losses == 1


def test_the_spool_of_a_process_that_spark_starts_again_is_removed_with_the_run():
    spools = Spools()
    for pid, letter in ((11, "a"), (12, "b")):  # the second was started in place of the first
        told = {"host": "a", "name": f"sparkdml-spool-{letter}", "whole": False}
        spools.note(0, told, 2, pid)
    spools.orphaned(0, 11)
    assert spools.stale() == ("sparkdml-spool-a",)
    assert spools.usable(2) == {}


def test_a_run_that_was_cancelled_in_spark_is_not_restarted():
    error = RuntimeError(
        "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 5 cancelled as part of "
        "cancellation of all jobs SQLSTATE: XXKDA\n\tat org.apache.spark"
    )
    ended = ended_by_spark(error)
    assert "cancelled in Spark: Job 5 cancelled as part of cancellation of all jobs" in str(ended)
    assert isinstance(ended, SparkEndedRun)
    assert Restarts(9).why_not(ended, 250, 0) == "another attempt would fail in the same way"
    assert ended_by_spark(RuntimeError("Job aborted due to stage failure")) is None


def test_a_dead_driver_jvm_gets_a_sentence():
    ended = ended_by_spark(ConnectionRefusedError(111, "Connection refused"))
    assert "the JVM of this session) has ended" in str(ended)
    assert "Connection refused" in str(ended)


def test_what_spark_says_of_a_dead_process_is_told():
    reason = "its process (pid 7) exited without reporting an error: it was killed, perhaps"
    lost = WorkerLost(1, "here", reason)
    assert with_spark_report(lost, None) is lost
    assert with_spark_report(lost, RuntimeError("Python worker exited unexpectedly")) is lost
    crashed = RuntimeError("(crashed): Fatal Python error: Segmentation fault\n\n  File x.py")
    told = with_spark_report(lost, crashed)
    assert "(pid 7) exited without reporting an error: it crashed (Segmentation fault)" in str(told)
    assert "File x.py" in told.worker_traceback
    gone = RuntimeError("x: ExecutorLostFailure (executor 1 exited) Reason: timed out\n\tat y")
    assert with_spark_report(lost, gone).reason.endswith("its executor was lost (timed out)")
