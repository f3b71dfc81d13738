"""Buffers at an epoch's end: means by rows, constants to the bit, infinities as they are."""

import copy

import pytest
import torch
from torch import nn

from sparkdml.comm.threads import run_threads
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import cut, digits, digits_plan
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.epoch_row import merge_buffers
from sparkdml.training.plan import Schedule


class Holder(nn.Module):
    """Buffers, and nothing else."""

    def __init__(self, **buffers):
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


def merged(modules, rows):
    def merge(comm):
        merge_buffers(modules[comm.rank], comm, rows[comm.rank])

    run_threads(len(modules), merge)
    return modules


class Masked(nn.Module):
    """Attention with a causal mask, as transformers have it, and positions as thirds of numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(8, 8), nn.Linear(8, 10)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("lowest", torch.full((3,), torch.finfo(torch.float32).min))
        self.register_buffer("positions", 1 / 3 ** torch.arange(8.0))

    def forward(self, x):
        seen = self.embed(x.view(-1, 8, 8) + self.positions)
        attention = (seen @ seen.transpose(1, 2) + self.mask).softmax(-1)
        return self.out((attention @ seen)[:, -1])


@pytest.mark.parametrize("sizes", [[100, 0], [20, 19, 21]])
def test_constants_stay_what_they_are_to_the_bit(sizes):
    plan = digits_plan(lr=0.1, model=Masked)
    trainings = train_on_threads(AllReduce, plan, Schedule(8, 8), cut(digits(100), sizes))
    assert trainings[0].history[-1]["loss"] < trainings[0].history[0]["loss"]
    expected = dict(Masked().named_buffers())
    for training in trainings:
        for name, buffer in training.task.module.named_buffers():
            assert torch.equal(buffer, expected[name]), name


def test_what_differs_becomes_the_mean_by_rows_or_rank_0s():
    modules = [
        Holder(mean=torch.full((2,), float(rank)), count=torch.tensor(5 + rank), same=torch.ones(1))
        for rank in range(3)
    ]
    for module in merged(modules, [10.0, 30.0, 0.0]):
        assert module.mean.tolist() == [0.75, 0.75]
        assert module.count.item() == 5
        assert module.same.item() == 1.0


def test_a_rank_without_rows_has_no_say_whatever_its_buffers_hold():
    bad = Holder(scale=torch.tensor([torch.inf, torch.nan]))
    for module in merged([Holder(scale=torch.tensor([2.0, -torch.inf])), bad], [7.0, 0.0]):
        assert module.scale.tolist() == [2.0, -torch.inf]


def test_where_no_rank_has_rows_buffers_stay():
    modules = [Holder(mean=torch.tensor([float(rank)])) for rank in range(2)]
    assert [module.mean.item() for module in merged(modules, [0.0, 0.0])] == [0.0, 1.0]


def test_half_precision_takes_any_number_of_rows():
    modules = [Holder(mean=torch.tensor([float(2 * rank + 1)]).half()) for rank in range(2)]
    for module in merged(copy.deepcopy(modules), [60_000.0, 60_000.0]):
        assert module.mean.item() == 2.0
        assert module.mean.dtype == torch.float16
