"""What an epoch counts: each row once, however often the run is resumed on other workers."""

import json

import pytest
import torch

from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.faults import FailsAt, Injected
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.models import RecordsRows, WritesRows
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.plan import Schedule


def make_recorder():
    return RecordsRows(64, 10)


@pytest.mark.parametrize("last", [4, 5])
def test_each_row_counts_once_though_two_runs_fail_in_the_same_epoch(tmp_path, last):
    """Three ranks have read 16, 0 and 16 rows, of which each of four has a third of 32."""
    rows = {**digits(360), "id": torch.arange(360)}
    plan = digits_plan(lr=0.1, model=make_recorder, features=("x", "id"))
    kept = MemoryCheckpoints(every=1)

    def train(size, fails_at):
        return train_on_threads(
            AllReduce,
            plan,
            Schedule(1, 8),
            cut(rows, [200, 0, 160, 0, 0][:size]),
            callbacks=[WritesRows(str(tmp_path)), FailsAt(0, fails_at)],
            checkpoints=kept,
        )

    resumed_from = []
    for size, fails_at in ((3, 3), (4, 4)):
        with pytest.raises(Injected):
            train(size, fails_at)
        resumed_from.append(kept.newest.step)
    assert resumed_from == [2, 3]
    training = train(last, 0)[0]
    assert training.history[0]["rows"] == 360

    attempts = ((3, 1, 2), (4, 3, 3), (last, 4, training.step))  # the steps that each brought home
    used = [
        row
        for size, first, stop in attempts
        for step in range(first, stop + 1)
        for rank in range(size)
        for row in json.loads((tmp_path / f"{size}-{step}-{rank}.json").read_text())
    ]
    assert sorted(used) == list(range(360))
