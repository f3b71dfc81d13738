"""Several roles on a real session: one gang of two, and ordinary tasks that Spark starts again."""

import os
import signal
import threading
from functools import partial

import pytest
import torch

import sparkdml as dml
from sparkdml.runtime.api import make_feed_plan
from sparkdml.runtime.driver.launch import launch
from sparkdml.runtime.driver.request import LaunchRequest
from sparkdml.runtime.protocol.plan import Options
from sparkdml.runtime.protocol.roles import Role
from sparkdml.testing.waiting import wait_until


class Notes:
    """A driver service that notes joins and leaves, and answers with the task that asks."""

    def __init__(self):
        self.notes, self.lock = [], threading.Lock()
        self.may_go = False

    def answer(self, peer, about, fields):
        if about == "let them go":
            self.may_go = True
        if about == "may I go":
            return self.may_go
        return [about, peer.role, peer.rank, peer.attempt, fields]

    def on_join(self, peer):
        with self.lock:
            self.notes.append((peer.role, peer.rank, peer.attempt, "came"))

    def on_leave(self, peer, outcome):
        with self.lock:
            self.notes.append((peer.role, peer.rank, peer.attempt, outcome))


def serve_and_work(num_workers, gang=False):
    return [
        Role("worker", num_workers, gang=gang, reads="none"),
        Role("server", 1, gang=False, reads="none"),
    ]


def test_two_roles_share_a_gang(spark):
    def body(ctx):
        own = ctx.comm.allreduce_(torch.tensor([1.0])).item()
        total = ctx.gang.allreduce_(torch.tensor([1.0])).item()
        return ctx.plan.role.name, ctx.rank, ctx.size, ctx.world.rank, ctx.number, own, total

    def roles(num_workers):
        return [Role("worker", num_workers), Role("helper", 1, reads="none")]

    frame = spark.range(20).toDF("id")
    feed = make_feed_plan(frame, None, 0)
    options = Options(num_workers=2, backend="torch")

    def read(ctx):
        rows = None
        if ctx.plan.role.name == "worker":
            rows = sum(batch.num_rows for batch in ctx.feed(4))
        return *body(ctx), rows

    *workers, helper = launch(LaunchRequest(spark, read, options, frame, feed, roles_of=roles))
    assert [worker[:-1] for worker in workers] == [
        ("worker", rank, 2, rank, rank, 2.0, 3.0) for rank in range(2)
    ]
    assert helper == ("helper", 0, 1, 2, 2, 1.0, 3.0, None)
    assert sum(worker[-1] for worker in workers) == 20


def test_too_few_slots_for_all_roles(spark):
    with pytest.raises(
        dml.NotEnoughSlots, match=r"4 workers and 1 server .* need 5 slots, but local\[4,4\] has 4"
    ):
        launch(LaunchRequest(spark, len, Options(num_workers=4), roles_of=serve_and_work))


def test_a_killed_task_is_started_again_alone(spark):
    def body(ctx):
        told = ctx.ask("who am I", really=True)
        if ctx.plan.role.name == "server":
            ctx.ask("let them go")  # who else might be done before it has come
            assert ctx.wait_for_the_end(120)
            return told
        if ctx.rank == 1 and ctx.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: ctx.ask("may I go"), seconds=120)
        return told

    driver_service = Notes()
    results = launch(
        LaunchRequest(
            spark,
            body,
            Options(num_workers=2),
            roles_of=serve_and_work,
            make_service=lambda num_workers: driver_service,
        )
    )
    fields = {"really": True}
    assert results == [
        ["who am I", "worker", 0, 0, fields],
        ["who am I", "worker", 1, 1, fields],
        ["who am I", "server", 0, 0, fields],
    ]
    of_the_killed = [note[2:] for note in driver_service.notes if note[:2] == ("worker", 1)]
    assert of_the_killed == [(0, "came"), (0, "lost"), (1, "came"), (1, "done")]


@pytest.mark.slow
def test_a_stopped_task_is_ended_and_started_again(spark):
    def body(ctx):
        if ctx.plan.role.name == "server":
            return ctx.wait_for_the_end(120)
        if ctx.attempt == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return ctx.attempt

    options = Options(num_workers=1, heartbeat_timeout=2.0)
    assert launch(LaunchRequest(spark, body, options, roles_of=serve_and_work)) == [1, True]


@pytest.mark.slow
@pytest.mark.parametrize("gang", [False, True])
def test_a_failure_for_good_ends_all_jobs(spark, gang):
    def body(ctx):
        if ctx.plan.role.name == "server":
            return ctx.wait_for_the_end(120)
        if ctx.rank == 1:
            raise ValueError(f"attempt {ctx.attempt}")
        return ctx.wait_for_the_end(120)

    with pytest.raises(
        dml.WorkerError, match=r"rank 1 on .* failed: ValueError: attempt"
    ) as caught:
        launch(
            LaunchRequest(
                spark,
                body,
                Options(num_workers=2, backend="torch"),
                roles_of=partial(serve_and_work, gang=gang),
            )
        )
    assert 'raise ValueError(f"attempt' in caught.value.worker_traceback
    assert f"attempt {0 if gang else 3}" in str(caught.value)


def test_a_server_that_is_lost_for_good_ends_the_workers(spark):
    def body(ctx):
        if ctx.plan.role.name == "server":
            os.kill(os.getpid(), signal.SIGKILL)
        return ctx.wait_for_the_end(120)

    with pytest.raises(dml.WorkerLost, match=r"server 0 on .* its process \(pid \d+\) exited"):
        launch(LaunchRequest(spark, body, Options(num_workers=1), roles_of=serve_and_work))
