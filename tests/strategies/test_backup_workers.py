"""Backup workers: the first gradients of a step count, models stay alike, losses are told."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdml.strategies.backup_workers import BackupWorkers, Root
from sparkdml.testing.digits import combined_batches, cut, digits, digits_plan, make_reader
from sparkdml.testing.faults import FailsAt, Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.strategy_contract import assert_alike
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.testing.waiting import wait_until
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule

NUM_STATS = 6


def gradient(number, votes=(0.0, 0.0, 0.0), rows=1.0):
    """One number, then the stats: weight, rows, loss, votes."""
    return [torch.tensor([float(number), rows, rows, 0.0, *votes])]


class Ranks:
    """Ranks that send to a root, one at a time, in any order; what each has been told so far."""

    def __init__(self, size, backup, max_lag):
        self.sums = {rank: [] for rank in range(size)}
        self.waits = dict.fromkeys(range(size), False)
        self.root = Root(size, size - backup, NUM_STATS, max_lag, self._reply)

    def _reply(self, rank, sums):
        assert self.waits[rank]
        self.waits[rank] = False
        self.sums[rank] += [total[0].tolist() for total in sums]

    def send(self, rank, votes=(0.0, 0.0, 0.0), rows=1.0):
        self.waits[rank] = True
        step = len(self.sums[rank])
        self.root.arrive(rank, step, gradient(2**rank, votes, rows))


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 5),
    backup=st.integers(0, 2),
    max_lag=st.integers(1, 4),
    order=st.lists(st.integers(0, 4), max_size=80),
)
def test_all_ranks_are_told_the_same_sums_in_order(size, backup, max_lag, order):
    backup = min(backup, size - 1)
    ranks = Ranks(size, backup, max_lag)
    num_sent = 0
    for rank in order:
        if rank < size and not ranks.waits[rank]:
            ranks.send(rank)
            num_sent += 1
        told = sorted(ranks.sums.values(), key=len)
        assert all(told[-1][: len(one)] == one for one in told)
        assert len(told[-1]) - len(told[0]) <= max_lag
    counted = sum(one[2] for one in max(ranks.sums.values(), key=len))  # the stats' rows
    held = len(ranks.root._arrived)
    assert num_sent == counted + held + ranks.root.num_dropped
    assert all(one[2] >= size - backup for one in max(ranks.sums.values(), key=len))
    assert len(ranks.root._sums) <= max_lag
    # No rank waits in vain: it is answered once the others have sent.
    for _ in range(2):
        for rank in range(size):
            if not ranks.waits[rank]:
                ranks.send(rank)
    assert not all(ranks.waits.values())


def test_the_first_arrivals_count_and_late_votes_are_heard():
    ranks = Ranks(3, 1, 8)
    ranks.send(2)
    ranks.send(0)
    assert ranks.sums[0] == [[5.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]]
    ranks.send(1, votes=(1.0, 0.0, 1.0))  # too late: dropped, but for its votes
    assert ranks.sums[1] == ranks.sums[0]
    assert ranks.root.num_dropped == 1
    ranks.send(1)
    ranks.send(0)
    assert ranks.sums[0][1] == [3.0, 2.0, 2.0, 0.0, 1.0, 0.0, 1.0]
    ranks.send(2)
    assert ranks.sums[2] == ranks.sums[0]


def test_one_that_is_too_far_behind_is_waited_for():
    ranks = Ranks(2, 1, max_lag=3)
    for _ in range(3):
        ranks.send(0)
    assert len(ranks.sums[0]) == 3
    ranks.send(0)
    assert ranks.waits[0]
    ranks.send(1)
    assert len(ranks.sums[1]) == 3
    assert not ranks.waits[0]


def test_one_without_rows_takes_no_place():
    ranks = Ranks(3, 1, max_lag=8)
    for _ in range(3):
        ranks.send(0, rows=0.0)
        ranks.send(1)
        assert ranks.waits[0]  # the third keeps up, and has rows
        ranks.send(2)
    assert [total[2] for total in ranks.sums[0]] == [2.0] * 3
    assert ranks.root.num_dropped == 0


def test_late_ranks_are_not_waited_for_by_those_without_rows():
    ranks = Ranks(3, 1, max_lag=8)
    ranks.send(0)
    ranks.send(1)
    ranks.send(2)  # dropped
    for _ in range(2):  # in step from now on, but it has lost the last race
        ranks.send(0, rows=0.0)
        ranks.send(1, rows=0.0)
        assert not ranks.waits[0]
    assert [total[2] for total in ranks.sums[0]] == [2.0, 0.0, 0.0]
    # Once it has been among the first, it is waited for again.
    ranks.send(2)
    ranks.send(2)
    ranks.send(0)
    ranks.send(1, rows=0.0)
    ranks.send(0, rows=0.0)
    assert ranks.waits[0]


@pytest.mark.parametrize("sizes", [[0, 40], [64, 5, 0]])
def test_rows_of_one_who_keeps_up_are_not_skipped(sizes):
    """A rank that alone has rows is never late."""
    trainings = train_on_threads(
        BackupWorkers, digits_plan(lr=0.1), Schedule(2, 8), cut(digits(sum(sizes)), sizes)
    )
    for row in trainings[0].history:
        assert row["rows"] + row["skipped_rows"] == sum(sizes)
        assert row["skipped_rows"] == 0
    assert_alike(trainings[1:], trainings[0].task.module, rtol=0, atol=0)


class StandsStill(nn.Module):
    """On the last of four ranks every batch takes until the others have none left."""

    others_are_done: threading.Event

    def __init__(self):
        super().__init__()
        self.reader = make_reader()

    def forward(self, x):
        if threading.current_thread().name == "rank-3":
            assert self.others_are_done.wait(60)
        return self.reader(x)


class TellsWhenDone(Callback):
    def on_step_end(self, training):
        if training.ctx.rank == 0 and training.step == 10:
            StandsStill.others_are_done.set()


def test_a_slow_worker_delays_no_other_and_its_rows_are_counted():
    StandsStill.others_are_done = threading.Event()
    parts = cut(digits(320), [80] * 4)
    plan = digits_plan(lr=0.1, momentum=0.9, model=StandsStill)
    trainings = train_on_threads(
        BackupWorkers, plan, Schedule(1, 8), parts, callbacks=[TellsWhenDone()]
    )
    for training in trainings:
        [row] = training.history
        assert (row["rows"], row["skipped_rows"], row["steps"]) == (240, 80, 10)
        assert training.step == 10
    notes = [e["text"] for e in trainings[0].ctx.events if e["kind"] == "note"]
    assert "80 of 320 rows were skipped" in notes[0]
    StandsStill.others_are_done.set()
    reference = train_alone(plan, [*combined_batches(parts[:3], 8)])
    assert_alike(trainings, reference, rtol=1e-4, atol=1e-5)  # the late one's model, too


def test_what_is_late_is_not_lost_for_the_next_steps():
    """Rank 1 of 2 takes part in the second half, having caught up."""
    halfway = threading.Event()

    class Waits(Callback):
        def on_step_start(self, training):
            if training.ctx.rank == 1 and training.step == 0:
                assert halfway.wait(60)

        def on_step_end(self, training):
            if training.ctx.rank == 0 and training.step == 5:
                halfway.set()

    trainings = train_on_threads(
        lambda: BackupWorkers(backup=1, max_lag=6),
        digits_plan(lr=0.1),
        Schedule(3, 8),
        cut(digits(160), [80, 80]),
        callbacks=[Waits()],
    )
    assert_alike(trainings[1:], trainings[0].task.module, rtol=0, atol=0)
    for row in trainings[0].history:
        assert row["rows"] + row["skipped_rows"] == 160
    assert trainings[0].history[0]["skipped_rows"] >= 8


def test_a_rank_that_raises_while_gradients_are_dropped_releases_all_and_the_run_continues():
    """Rank 3 is four steps late and catches up; rank 1 fails after a checkpoint of all of them."""
    StandsStill.others_are_done = threading.Event()
    kept = MemoryCheckpoints(every=2)

    class Fails(FailsAt):
        def on_step_end(self, training):
            if training.ctx.rank == 0 and training.step == 4:
                StandsStill.others_are_done.set()
            if (training.ctx.rank, training.step) == (self.rank, self.step):
                wait_until(lambda: kept.newest.step > 0, seconds=60)
            super().on_step_end(training)

    def train(fails_at):
        return train_on_threads(
            BackupWorkers,
            digits_plan(lr=0.1, momentum=0.9, model=StandsStill),
            Schedule(2, 8),
            cut(digits(320), [80] * 4),
            callbacks=[Fails(1, fails_at)],
            checkpoints=kept,
        )

    with pytest.raises(Injected, match="rank 1 at step 9"):
        train(9)
    trainings = train(0)
    assert_alike(trainings[1:], trainings[0].task.module, rtol=0, atol=0)
    for row in trainings[0].history:
        assert row["rows"] + row["skipped_rows"] == 320
    assert trainings[0].history[0]["skipped_rows"] >= 8


@pytest.mark.parametrize("backup", [1, 5])
def test_more_backups_than_workers_leave_one(backup):
    rows = digits(40)
    trainings = train_on_threads(
        lambda: BackupWorkers(backup=backup), digits_plan(lr=0.1), Schedule(1, 8), [rows]
    )
    assert trainings[0].history[0]["skipped_rows"] == 0
    notes = [e for e in trainings[0].ctx.events if e["kind"] == "note"]
    assert "waits for one gradient" in notes[0]["text"]
