"""`dml.run` on a real session: ranks, data, errors, and what is left behind."""

import os
import signal
import sys
import threading
import time
import types

import numpy as np
import psutil
import pytest
import torch

import sparkdml as dml
from sparkdml.comm.backends import horovod_available
from sparkdml.errors import ProtocolError

needs_horovod = pytest.mark.skipif(not horovod_available(), reason="Horovod isn't installed")
BACKENDS = ["torch", pytest.param("horovod", marks=needs_horovod)]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.1)
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_runs_and_answers_in_order(spark, backend):
    def fn(ctx):
        total = ctx.comm.allreduce_(torch.tensor([ctx.rank + 1.0]))
        threads = torch.get_num_threads()
        return ctx.rank, ctx.size, ctx.local_rank, str(ctx.device), total.item(), threads

    results = dml.run(fn, num_workers=3, backend=backend, spark=spark)
    assert results == [(rank, 3, rank, "cpu", 6.0, 1) for rank in range(3)]


def test_no_number_takes_all_slots(spark):
    assert dml.run(lambda ctx: ctx.size, spark=spark) == [4] * 4


def test_cpus_per_worker_sets_threads_and_counts_slots(spark):
    def threads(ctx):
        return torch.get_num_threads()

    assert dml.run(threads, cpus_per_worker=2, spark=spark) == [2, 2]
    with pytest.raises(
        dml.NotEnoughSlots, match=r"3 workers \(with 2 CPU each\) .* has 2.*local\[6\]"
    ):
        dml.run(threads, num_workers=3, cpus_per_worker=2, spark=spark)


def test_too_few_slots_is_an_error_at_once(spark):
    began = time.monotonic()
    with pytest.raises(
        dml.NotEnoughSlots, match=r"9 workers .* need 9 slots, but local\[4,4\] has 4"
    ):
        dml.run(lambda ctx: None, num_workers=9, spark=spark)
    assert time.monotonic() - began < 5


def test_each_row_reaches_one_rank_once(spark):
    rows = spark.range(1000).selectExpr("id", "array(cast(id as float), 1f) as x")

    def read(ctx):
        epochs = []
        for epoch in range(2):
            batches = list(ctx.feed(64, epoch))
            assert all(torch.equal(b["x"][:, 0], b["id"].float()) for b in batches)
            epochs.append([i for b in batches for i in b["id"].tolist()])
        return epochs

    results = dml.run(read, rows, num_workers=3)
    for epoch in range(2):
        assert sorted(i for rank in results for i in rank[epoch]) == list(range(1000))
    assert results[0][0] != results[0][1]
    # Another partitioning of the same rows gives every rank the same rows in the same order.
    assert dml.run(read, rows.repartition(7), num_workers=3) == results


def test_rows_may_be_left_unread(spark):
    """The reader that runs ahead must not be in the way of what ends the task."""

    def read_one(ctx):
        return next(ctx.feed(10)).num_rows

    rows = spark.range(50_000)
    for _ in range(3):
        assert dml.run(read_one, rows, num_workers=2) == [10, 10]


def test_uneven_ranks_get_equally_many_batches(spark):
    def count(ctx):
        sizes = [batch.num_rows for batch in ctx.batches(10)]
        return len(sizes), sum(sizes)

    results = dml.run(count, spark.range(95), num_workers=3, backend="torch")
    assert len({steps for steps, _ in results}) == 1
    assert sum(rows for _, rows in results) == 95


def test_an_rdd_of_anything(spark):
    lines = spark.sparkContext.parallelize([f"line {i}" for i in range(50)], 3)
    results = dml.run(lambda ctx: list(ctx.rows()), lines, num_workers=2)
    assert sorted(results[0] + results[1]) == sorted(f"line {i}" for i in range(50))
    assert dml.run(lambda ctx: list(ctx.rows()), lines.repartition(5), num_workers=2) == results


def test_an_rdd_of_numbers_becomes_tensors(spark):
    rows = spark.sparkContext.parallelize([(i, [float(i), 0.5]) for i in range(50)])

    def read(ctx):
        return [i for b in ctx.feed(8) for i in b["_1"].tolist() if b["_2"].shape[1] == 2]

    results = dml.run(read, rows, num_workers=2)
    assert sorted(results[0] + results[1]) == list(range(50))


def test_an_rdd_of_strings_cannot_become_tensors(spark):
    with pytest.raises(dml.DataError, match=r"field 'value' has values of type str.*ctx.rows"):
        dml.run(lambda ctx: list(ctx.feed(8)), spark.sparkContext.parallelize(["a", "b"]), 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_in_turn_reuse_the_python_workers(spark, backend):
    def fn(ctx):
        ctx.comm.barrier()
        return os.getpid()

    # Spark's idle workers take turns, so more runs than there are of them.
    pids = [dml.run(fn, spark.range(10), num_workers=2, backend=backend) for _ in range(6)]
    assert len({pid for run in pids for pid in run}) <= 8
    assert all(len(set(run)) == 2 for run in pids)


def test_runs_at_the_same_time_do_not_disturb_each_other(spark):
    results = {}

    def start(name, value):
        def fn(ctx):
            for _ in range(20):
                total = ctx.comm.allreduce_(torch.tensor([value])).item()
                assert total == 2 * value
            return total

        results[name] = dml.run(fn, num_workers=2, backend="torch", spark=spark)

    threads = [threading.Thread(target=start, args=(i, float(i))) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [2.0, 2.0], 2: [4.0, 4.0]}


def test_an_unmodified_ddp_script(spark):
    def script(ctx):
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(3, 2) * (dist.get_rank() + 1)).sum().backward()
        return model.module.weight.grad.tolist()

    assert dml.run(script, num_workers=2, spark=spark) == [[[4.5, 4.5]]] * 2


@needs_horovod
def test_an_unmodified_horovod_script(spark):
    def script(ctx):
        import horovod.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
        return hvd.size(), hvd.local_rank(), total.item()

    for _ in range(2):
        assert dml.run(script, num_workers=2, spark=spark) == [(2, 0, 3.0), (2, 1, 3.0)]


def test_the_environment_is_put_back(spark):
    def look(ctx):
        return {name for name in os.environ if name.startswith(("HOROVOD", "MASTER", "RANK"))}

    inside = dml.run(look, num_workers=1, spark=spark)[0]
    assert {"HOROVOD_RANK", "MASTER_ADDR", "RANK"} <= inside
    after = spark.range(4).mapInArrow(_environment_names, "name string").collect()
    assert not [row.name for row in after if row.name.startswith(("HOROVOD", "MASTER", "RANK"))]


def _environment_names(batches):
    import pyarrow as pa

    for _ in batches:
        yield pa.RecordBatch.from_pydict({"name": list(os.environ)})


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_raises(spark, backend, tmp_path):
    def fn(ctx):
        (tmp_path / str(ctx.rank)).write_text(str(os.getpid()))
        ctx.comm.barrier()
        if ctx.rank == 1:
            raise KeyError("no such thing")
        ctx.comm.barrier()

    began = time.monotonic()
    with pytest.raises(dml.WorkerError, match=r"rank 1 on .* failed: KeyError") as raised:
        dml.run(fn, num_workers=2, backend=backend, spark=spark)
    assert time.monotonic() - began < 10
    assert raised.value.rank == 1
    assert raised.value.host
    assert 'raise KeyError("no such thing")' in raised.value.worker_traceback
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    ("backend", "signal_number"),
    [
        ("torch", signal.SIGKILL),
        ("torch", signal.SIGSTOP),
        pytest.param("horovod", signal.SIGKILL, marks=needs_horovod),
        pytest.param("horovod", signal.SIGSTOP, marks=[needs_horovod, pytest.mark.slow]),
    ],
)
def test_a_worker_that_is_killed_or_stops_answering(spark, backend, signal_number, tmp_path):
    def fn(ctx):
        (tmp_path / str(ctx.rank)).write_text(str(os.getpid()))
        ctx.comm.barrier()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal_number)
        ctx.comm.barrier()

    began = time.monotonic()
    with pytest.raises(dml.WorkerLost, match="rank 1 on") as raised:
        dml.run(fn, num_workers=2, backend=backend, heartbeat_timeout=2, spark=spark)
    assert time.monotonic() - began < 12
    assert raised.value.rank == 1
    killed = signal_number == signal.SIGKILL
    expected = "exited without reporting" if killed else "has sent no heartbeat"
    assert expected in str(raised.value)
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert wait_until_gone(pids) == []


def test_a_slow_worker_is_not_a_lost_one(spark):
    def fn(ctx):
        if ctx.rank == 1:
            time.sleep(2.5)
        ctx.comm.barrier()
        return "fine"

    assert dml.run(fn, num_workers=2, heartbeat_timeout=1, backend="torch", spark=spark) == [
        "fine",
        "fine",
    ]


def test_ctrl_c_cancels_and_leaves_no_process(spark, tmp_path):
    """A driver of its own is interrupted by a slow test."""
    over = threading.Event()

    def forever(ctx):
        (tmp_path / f"rank-{ctx.rank}").write_text(str(os.getpid()))
        while True:
            ctx.comm.allreduce_(torch.ones(1))
            time.sleep(0.05)

    def interrupt():
        while len(list(tmp_path.glob("rank-*"))) < 2:
            if over.wait(0.02):
                return
        if not over.wait(0.5):  # they are in the middle of it
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            dml.run(forever, num_workers=2, spark=spark)
    finally:
        over.set()
        thread.join()
    pids = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert not any(map(alive, pids))
    assert dml.run(lambda ctx: ctx.rank, num_workers=2, spark=spark) == [0, 1]


def test_after_a_failure_the_session_is_usable(spark):
    with pytest.raises(dml.WorkerError):
        dml.run(lambda ctx: 1 / 0, num_workers=2, spark=spark)
    assert dml.run(lambda ctx: ctx.rank, num_workers=4, spark=spark) == [0, 1, 2, 3]


# -- rows and settings that can't be used -------------------------------------------------------


def feed_all(ctx):
    return [batch.num_rows for batch in ctx.feed(8)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(1, 0.5), (2, None)], r"column 'x' is null in the row \(id=2"),
        ([(1, [0.5, None]), (2, [1.0, 2.0])], r"'x' has a null inside .* \(id=1"),
        ([(i, [0.5, 1.0]) for i in range(30)] + [(99, [1.0])], r"'x' has \d elements in the row"),
    ],
)
def test_bad_rows_name_column_and_row(spark, rows, words):
    with pytest.raises(dml.DataError, match=words):
        dml.run(feed_all, spark.createDataFrame(rows, ["id", "x"]), num_workers=2)


def test_bad_rows_are_found_before_the_first_batch_however_late_they_come(spark):
    """One ragged array among many: no rank is handed a single batch."""
    from pyspark.sql import functions as F

    length = F.when(F.col("id") == 29_999, 1).otherwise(2)
    rows = spark.range(30_000).select("id", F.array_repeat(F.lit(1.0), length).alias("x"))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 100)
    try:
        seen = []
        with pytest.raises(dml.DataError, match="'x' has 1 elements in the row"):
            dml.run(
                lambda ctx: [ctx.log(rows=batch.num_rows) for batch in ctx.feed(8)],
                rows,
                num_workers=2,
                on_event=lambda rank, message: seen.append(message),
            )
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert [message for message in seen if message["kind"] == "log"] == []


def test_no_rows(spark):
    with pytest.raises(dml.DataError, match="the data has no rows"):
        dml.run(feed_all, spark.range(0), num_workers=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fn": 3}, "fn must be a function"),
        ({"num_workers": 0}, "num_workers must be at least 1"),
        ({"backend": "pigeons"}, "backend must be one of"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be at least 1"),
        ({"gpus_per_worker": 2}, "gpus_per_worker must be 0 or 1"),
        ({"slot_timeout": -1}, "slot_timeout must be 0 or more"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout must be more than 0"),
        ({"data": [1, 2]}, "data must be a DataFrame, an RDD or None"),
    ],
)
def test_bad_arguments(spark, arguments, words):
    with pytest.raises(dml.ParameterError, match=words):
        dml.run(**{"fn": feed_all, "spark": spark, **arguments})


def test_a_gpu_that_spark_has_not_assigned(spark):
    with pytest.raises(dml.SetupError, match=r"spark\.task\.resource\.gpu\.amount"):
        dml.run(feed_all, num_workers=1, gpus_per_worker=1, spark=spark)


def test_a_function_that_cannot_be_pickled(spark):
    lock = threading.Lock()
    with pytest.raises(Exception, match="pickle"):
        dml.run(lambda ctx: lock, num_workers=1, spark=spark)


def test_a_module_that_workers_do_not_have(spark, monkeypatch):
    ghost = types.ModuleType("a_module_of_the_driver_alone")
    ghost.answer = types.FunctionType((lambda ctx: 42).__code__, {}, "answer")
    ghost.answer.__module__, ghost.answer.__qualname__ = ghost.__name__, "answer"
    monkeypatch.setitem(sys.modules, ghost.__name__, ghost)
    with pytest.raises(dml.SetupError, match=r"No module named 'a_module_of_the_driver_alone'"):
        dml.run(ghost.answer, num_workers=1, spark=spark)


def test_what_json_cannot_carry_is_refused_where_it_is_logged(spark):
    def log(ctx):
        for value in (3, 0.5, "text", torch.tensor(2.5), np.float32(1.5)):
            ctx.log(value=value)
        for value in (torch.zeros(3), {"a": 1}):
            with pytest.raises(dml.ParameterError, match=r"ctx\.log\(value"):
                ctx.log(value=value)
        ctx.log(value=torch.zeros(3))  # it reaches the driver as itself

    heard = []
    with pytest.raises(dml.ParameterError, match=r"ctx\.log\(value"):
        dml.run(
            log,
            num_workers=1,
            spark=spark,
            on_event=lambda _, event: heard.append(event),
        )
    logged = [event["values"]["value"] for event in heard if event["kind"] == "log"]
    assert logged == [3, 0.5, "text", 2.5, 1.5]


class Counter:
    """A function object for `dml.run` whose workers count at the driver."""

    def __init__(self):
        self.total, self.lock = 0, threading.Lock()

    def __getstate__(self):
        return {}  # what the driver keeps is not shipped

    def driver_service(self, num_workers):
        return self

    def answer(self, peer, about, fields):
        if about != "add":
            raise ProtocolError(f"a counter has no question {about!r}")
        with self.lock:
            self.total += fields["number"]
        return f"{peer.role} {peer.rank}"

    def on_join(self, peer):
        pass

    def on_leave(self, peer, outcome):
        pass

    def __call__(self, ctx):
        with pytest.raises(ProtocolError, match="a counter has no question 'subtract'"):
            ctx.ask("subtract")
        return ctx.ask("add", number=ctx.rank + 1)


def test_a_function_object_has_a_driver_service(spark):
    counter = Counter()
    assert dml.run(counter, num_workers=2, spark=spark) == ["worker 0", "worker 1"]
    assert counter.total == 3


def test_a_question_to_a_driver_service_that_is_not_there(spark):
    def ask(ctx):
        with pytest.raises(ProtocolError, match=r"no driver service to ask about 'add'"):
            ctx.ask("add")
        return ctx.rank

    assert dml.run(ask, num_workers=2, spark=spark) == [0, 1]
