"""Adaptive balance on threads: AllReduce's very steps, computed by the faster ranks."""

import pytest
import torch

from sparkdml.strategies.adaptive_balance import AdaptiveBalance, Stopwatch
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import combined_batches, cut, digits, digits_plan
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.strategy_contract import assert_alike
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule


class Measured(AdaptiveBalance):
    """As if the last of four ranks had been found to be four times slower."""

    def _measure(self, training):
        self._speeds = [4.0, 4.0, 4.0, 1.0]


class CountsRows(Callback):
    def __init__(self):
        self.rows = {}

    def on_step_end(self, training):
        self.rows.setdefault(training.ctx.rank, []).append(int(training.epoch.own_rows))


def test_rows_move_and_the_result_is_that_of_allreduce():
    parts = cut(digits(420), [100, 110, 90, 120])
    plan, counts = digits_plan(lr=0.1, momentum=0.9), CountsRows()
    trainings = train_on_threads(
        lambda: Measured(every=2), plan, Schedule(2, 8), parts, callbacks=[counts]
    )
    reference = train_alone(plan, [*combined_batches(parts, 8)] * 2)
    assert_alike(trainings, reference, rtol=1e-4, atol=1e-5)
    plain = train_on_threads(AllReduce, plan, Schedule(2, 8), parts)
    for row, expected in zip(trainings[0].history, plain[0].history, strict=True):
        assert (row["rows"], row["steps"]) == (expected["rows"], expected["steps"]) == (420, 15)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert row["accuracy"] == pytest.approx(expected["accuracy"])
    assert trainings[0].history[0]["moved_rows"] > 60
    # Two steps of 8 rows each before the first look, then 1/13 of every step.
    second_epoch = counts.rows[3][-1]
    assert second_epoch <= 420 / 13 + 15
    assert sum(rows[-1] for rows in counts.rows.values()) == 420


def test_a_slow_rank_is_found_out():
    class FourTimesSlower:
        """A stopwatch whose seconds are the rows, and on rank 1 four times as many."""

        def __init__(self, rank):
            self.factor, self.rows = 4.0 if rank == 1 else 1.0, 0

        def start(self, num_rows):
            self.rows += num_rows

        def stop(self):
            pass

        def take(self):
            rows, self.rows = float(self.rows), 0
            return rows * self.factor, rows

    class Watched(AdaptiveBalance):
        def start(self, training):
            super().start(training)
            self._stopwatch = FourTimesSlower(training.ctx.rank)

    counts = CountsRows()
    parts = cut(digits(640), [320, 320])
    train_on_threads(
        lambda: Watched(every=2), digits_plan(lr=0.1), Schedule(1, 16), parts, callbacks=[counts]
    )
    assert counts.rows[1][1] == 32  # two even steps, then a fifth of each
    assert counts.rows[1][-1] == pytest.approx(32 + (640 - 64) / 5, abs=20)
    assert counts.rows[0][-1] + counts.rows[1][-1] == 640


def test_the_stopwatch_counts_computing_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = Stopwatch(torch.device("cpu"))
    for rows, seconds in ((8, 2.0), (0, 5.0), (4, 1.0)):
        watch.start(rows)
        now[0] += seconds
        watch.stop()
        now[0] += 100.0  # waits for the others
        watch.stop()
    assert watch.take() == (3.0, 12.0)
    assert watch.take() == (0.0, 0.0)


@pytest.mark.parametrize("sizes", [[150, 50], [40, 60, 100]])
def test_a_run_resumes_within_an_epoch_with_each_row_once(sizes):
    seen = []

    class Fails(Callback):
        def on_step_end(self, training):
            if training.ctx.rank == 1 and training.step == 5:
                raise KeyError("a fault")

    class Sees(AdaptiveBalance):
        def batches(self, training, epoch):
            for batch in super().batches(training, epoch):
                seen.extend(batch["y"].tolist() if batch.num_rows else [])
                self._speeds = [3.0, *[1.0] * (training.ctx.size - 1)]
                yield batch

    rows = digits(200)
    plan, kept = digits_plan(lr=0.1), MemoryCheckpoints(every=4)
    parts = cut(rows, sizes)
    with pytest.raises(KeyError):
        train_on_threads(
            lambda: Sees(every=1),
            plan,
            Schedule(1, 8),
            parts,
            callbacks=[Fails()],
            checkpoints=kept,
        )
    assert kept.newest.step == 4
    seen.clear()
    trainings = train_on_threads(
        lambda: Sees(every=1), plan, Schedule(1, 8), parts, callbacks=[Callback()], checkpoints=kept
    )
    assert len(seen) == 200 - 4 * 8 * len(sizes)
    assert trainings[0].history[0]["rows"] == 200
    reference = train_alone(plan, [*combined_batches(parts, 8)])
    assert_alike(trainings, reference, rtol=1e-4, atol=1e-5)
