"""Real processes that exchange messages: when one raises, nobody waits for it."""

import time

import pytest

import sparkdml as dml
from sparkdml.comm.backends import open_communicator
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.faults import Injected
from sparkdml.testing.rank_processes import RankProcesses
from sparkdml.testing.strategy_contract import FailsAt
from sparkdml.testing.threads import ThreadContext, train_rank
from sparkdml.training.training import Schedule

STRATEGIES = {"BackupWorkers": dml.BackupWorkers(backup=0), "Gossip": dml.Gossip()}


def train_until_rank_1_fails(world, name):
    """What ended the run on this rank, and when."""
    try:
        with open_communicator("torch", world) as comm:
            context = ThreadContext(comm, cut(digits(300), [100] * 3)[comm.rank])
            callbacks = [FailsAt(1, 3)]
            train_rank(context, STRATEGIES[name], digits_plan(), Schedule(5, 8), callbacks)
    except Exception as error:
        return type(error).__name__, time.time()
    return "nothing", time.time()


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_leave_when_one_raises(name):
    with RankProcesses(None, 3, patience_seconds=30) as ranks:
        ended = ranks.run(train_until_rank_1_fails, name)
    assert [kind for kind, _ in ended] == [
        "CommunicationError",
        Injected.__name__,
        "CommunicationError",
    ]
    assert max(when for _, when in ended) - ended[1][1] < 15
