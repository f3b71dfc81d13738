"""Checkpoints within an epoch of a parameter server: of one moment, or not at all.

That a resumed run ends with the same bits is in the contract suite.
"""

from functools import partial

import pytest

from sparkdml.parameter_server.consistency import SSP, TAP, Expulsion
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.faults import FailsAt, Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.served_threads import train_served
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule

PARTS = cut(digits(136), [64, 48, 24])  # 8, 6 and 3 steps


def train(strategy_of, kept, callbacks=(), max_attempts=1, epochs=2):
    return train_served(
        strategy_of,
        digits_plan(lr=0.1),
        Schedule(epochs, 8),
        PARTS,
        callbacks=list(callbacks),
        checkpoints=kept,
        max_attempts=max_attempts,
    )


def steps_within(kept):
    return [saved.step for saved in kept._saved if saved.kind == "step" and saved.is_complete]


def test_bsp_saves_within_an_epoch_though_some_workers_have_no_rows_left():
    kept = MemoryCheckpoints(every=2)
    trained = train(ParameterServer, kept)
    assert steps_within(kept) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [row["rows"] for row in trained[0].history] == [136.0] * 2
    assert [training.step for training in trained] == [16] * 3


@pytest.mark.parametrize(
    "strategy_of",
    [
        pytest.param(partial(ParameterServer, consistency=SSP(2)), marks=pytest.mark.slow),
        partial(ParameterServer, consistency=TAP()),
        partial(ParameterServer, expulsion=Expulsion(1e9)),
    ],
    ids=["SSP", "TAP", "expulsion"],
)
def test_others_save_at_the_ends_of_epochs(strategy_of):
    kept = MemoryCheckpoints(every=2)
    train(strategy_of, kept)
    assert steps_within(kept) == []
    assert kept.newest is not None


class FailsOnce(Callback):
    def on_step_end(self, training):
        ctx = training.ctx
        if (ctx.rank, training.step, ctx.attempt) == (1, 3, 0):
            raise Injected("once")


def test_while_a_worker_is_behind_nothing_is_saved_and_every_row_counts_after_a_resume():
    kept = MemoryCheckpoints(every=1)
    trained = train(ParameterServer, kept, [FailsOnce(), FailsAt(0, 0)], max_attempts=2)
    assert [row["rows"] for row in trained[0].history] == [136.0] * 2
    end = next(saved.step for saved in kept._saved if saved.kind == "epoch")
    assert steps_within(kept) == [1, 2, *range(end + 1, trained[0].step + 1)]

    kept = MemoryCheckpoints(every=1)
    with pytest.raises(Injected):
        train(ParameterServer, kept, [FailsOnce(), FailsAt(0, 13)], max_attempts=2)
    assert kept.newest.step >= 8
    resumed = train(ParameterServer, kept, [FailsOnce(), FailsAt(0, 0)], max_attempts=2, epochs=3)
    assert [row["rows"] for row in resumed[2].history] == [136.0] * 3


def test_a_worker_that_dies_after_a_resume_within_an_epoch_continues_from_there():
    """It has the checkpoint's position, the rows since then, and all workers' history."""

    class FailsLater(Callback):
        def on_step_end(self, training):
            ctx = training.ctx
            if (ctx.rank, training.step, ctx.attempt) == (0, 15, 0):
                raise Injected("once")

    kept = MemoryCheckpoints(every=3)
    with pytest.raises(Injected):
        train(ParameterServer, kept, [FailsAt(2, 13)], epochs=3)
    assert kept.newest.step == 12
    resumed = train(ParameterServer, kept, [FailsLater()], max_attempts=2, epochs=3)
    for training in resumed:
        assert [row["rows"] for row in training.history] == [136.0] * 3
