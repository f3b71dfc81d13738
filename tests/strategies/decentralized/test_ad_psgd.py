"""AD-PSGD: pairs keep their sum, slow ranks delay no other, each row is used once."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn

from sparkdml.comm.threads import run_threads
from sparkdml.errors import CommunicationError
from sparkdml.strategies.decentralized.ad_psgd import ADPSGD, Exchange, Replica
from sparkdml.testing.digits import cut, digits, digits_plan, make_reader
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.callbacks import Callback
from sparkdml.training.plan import Schedule


def test_a_pair_keeps_its_sum_whatever_steps_are_taken_meanwhile():
    one, other = torch.tensor([1.0, 5.0]), torch.tensor([3.0, -1.0])
    active, passive = Replica(one), Replica(other)
    sent, replied = torch.empty(2), torch.empty(2)
    active.read_into(sent)
    active.add(torch.tensor([10.0, 0.0]))  # a step of the active rank, while its message travels
    passive.meet(sent, replied)
    passive.add(torch.tensor([0.0, 7.0]))
    active.add(replied - sent, 0.5)
    after = torch.stack([torch.empty(2), torch.empty(2)])
    active.read_into(after[0])
    passive.read_into(after[1])
    assert torch.equal(after[0], torch.tensor([12.0, 2.0]))
    assert torch.equal(after[1], torch.tensor([2.0, 9.0]))
    assert torch.equal(after.sum(0), one + other + torch.tensor([10.0, 7.0]))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_exchanges_alone_bring_replicas_together(size):
    def run(comm):
        values = torch.full((3,), float(comm.rank))
        replica = Replica(values)
        with Exchange(replica, values, comm, seed=1) as exchange:
            for _ in range(60):
                exchange.poke()
                exchange.rest()
                comm.barrier()
        replica.read_into(values)
        return values, exchange.num_exchanges

    results = run_threads(size, run)
    mean = (size - 1) / 2
    torch.testing.assert_close(sum(v for v, _ in results) / size, torch.full((3,), mean))
    for values, num_exchanges in results:
        torch.testing.assert_close(values, torch.full((3,), mean), rtol=0, atol=0.05)
        assert (num_exchanges > 0) == (size > 1)


def test_a_partner_that_is_gone_is_an_error_and_no_hang():
    def run(comm):
        values = torch.zeros(3)
        with Exchange(Replica(values), values, comm, seed=1) as exchange:
            if comm.rank == 1:
                raise KeyError("a fault")
            for _ in range(10_000):
                exchange.poke()
                exchange.rest()

    with pytest.raises(KeyError, match="a fault"):
        run_threads(2, run)

    def leave(comm):
        with Exchange(Replica(torch.zeros(3)), torch.zeros(3), comm, seed=1) as exchange:
            if comm.rank == 0:
                comm.abort()
                exchange.poke()
                exchange.rest()

    with pytest.raises(CommunicationError):
        run_threads(2, leave)


class StandsStill(nn.Module):
    """On rank 3, the first batch takes until all others have trained on all that they can get."""

    others_are_done: threading.Event
    trained: Counter

    def __init__(self):
        super().__init__()
        self.reader = make_reader()

    def forward(self, x):
        rank = int(threading.current_thread().name.removeprefix("rank-"))
        if rank == 3:
            assert self.others_are_done.wait(60)
        self.trained[rank] += len(x)
        if sum(self.trained[r] for r in range(3)) >= 320 - 4 * 8:  # the longest lease is not theirs
            self.others_are_done.set()
        return self.reader(x)


def test_a_slow_rank_delays_no_other():
    StandsStill.others_are_done, StandsStill.trained = threading.Event(), Counter()
    trainings = train_on_threads(
        lambda: ADPSGD(every=100),
        digits_plan(lr=0.1, model=StandsStill),
        Schedule(1, 8),
        cut(digits(320), [80] * 4),
    )
    assert StandsStill.trained[3] <= 4 * 8
    assert sum(StandsStill.trained.values()) == 320
    [row] = trainings[0].history
    assert row["rows"] == 320
    assert row["consensus_distance"] > 0


def test_a_run_resumes_within_an_epoch_with_each_row_once():
    class Fails(Callback):
        def on_step_end(self, training):
            if training.ctx.rank == 1 and training.step == 2:
                raise KeyError("a fault")

    plan, kept = digits_plan(lr=0.1, momentum=0.5), MemoryCheckpoints(every=1)
    parts = cut(digits(200), [120, 80])
    with pytest.raises(KeyError):
        train_on_threads(
            lambda: ADPSGD(every=4),
            plan,
            Schedule(1, 8),
            parts,
            callbacks=[Fails()],
            checkpoints=kept,
        )
    assert kept.newest.step == 1
    trainings = train_on_threads(
        lambda: ADPSGD(every=4),
        plan,
        Schedule(1, 8),
        parts,
        callbacks=[Callback()],
        checkpoints=kept,
    )
    assert (
        trainings[0].history[0]["rows"] == 200
    )  # those of the first run's only meeting among them
