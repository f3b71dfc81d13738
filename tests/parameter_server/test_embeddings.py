"""Embeddings under a parameter server: only rows that a batch touched are pushed."""

from functools import partial

import pytest
import torch
from torch import nn

from sparkdml.errors import CheckpointError
from sparkdml.parameter_server.consistency import TAP
from sparkdml.parameter_server.downpour import Downpour
from sparkdml.parameter_server.model_tables import ServedTables
from sparkdml.parameter_server.optimizers import SGD, Adagrad, Adam
from sparkdml.parameter_server.strategy import ParameterServer
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import cut, digits_plan
from sparkdml.testing.served_threads import train_served
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.flat import FlatParams
from sparkdml.training.plan import Schedule

NUM_WORDS, WIDTH = 3000, 4


class Reader(nn.Module):
    """Texts of five words each, of two kinds."""

    def __init__(self, sparse=False):
        super().__init__()
        self.head = nn.Linear(7, WIDTH)  # before and behind the embedding there is more
        self.words = nn.Embedding(NUM_WORDS, WIDTH, sparse=sparse)
        self.kinds = nn.Linear(WIDTH, 16)

    def forward(self, words):
        return self.kinds(self.words(words.long()).mean(1) + self.head.bias)


def texts(count=96):
    words = torch.randint(0, NUM_WORDS, (count, 5), generator=torch.Generator().manual_seed(1))
    return {"x": words, "y": (words[:, 0] % 2).long()}


def train(train_on, strategy_of, optimizer, sparse=False):
    plan = digits_plan(model=partial(Reader, sparse), optimizer=optimizer, metrics={})
    parts = cut(texts(), [56, 40])
    return train_on(strategy_of, plan, Schedule(2, 8), parts)


def num_pushed(trainings):
    events = {id(event): event for one in trainings for event in one.ctx.events}
    return sum(e["bytes_pushed"] for e in events.values() if e["kind"] == "client")


WHOLE = 4 * NUM_WORDS * WIDTH  # bytes


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(partial(torch.optim.SGD, lr=0.1), marks=pytest.mark.slow),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
    ids=["SGD", "Adagrad"],
)
def test_rows_are_pushed_and_bsp_equals_allreduce(optimizer):
    ours = train(train_served, ParameterServer, optimizer)
    theirs = train(train_on_threads, AllReduce, optimizer)
    torch.testing.assert_close(
        ours[0].task.params.values, theirs[0].task.params.values, rtol=1e-4, atol=1e-5
    )
    assert num_pushed(ours) < WHOLE  # 24 pushes, of 40 rows each


@pytest.mark.parametrize(
    ("optimizer", "sparse", "by_rows"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), False, False),
        pytest.param(
            partial(torch.optim.SGD, lr=0.1, momentum=0.9), True, True, marks=pytest.mark.slow
        ),
        (partial(torch.optim.Adam, lr=0.01), True, True),
    ],
)
def test_what_moves_untouched_rows_goes_by_rows_only_if_asked(optimizer, sparse, by_rows):
    trained = train(train_served, ParameterServer, optimizer, sparse)
    assert (num_pushed(trained) < WHOLE) == by_rows
    assert trained[0].history[1]["loss"] < trained[0].history[0]["loss"]
    untouched = sorted(set(range(NUM_WORDS)) - set(texts()["x"].view(-1).tolist()))
    torch.manual_seed(0)
    before, after = Reader().words.weight, trained[0].task.module.words.weight
    assert torch.equal(before[untouched], after[untouched])


@pytest.mark.parametrize(
    "strategy_of",
    [partial(ParameterServer, consistency=TAP()), partial(Downpour, 2, 3)],
    ids=["TAP", "Downpour"],
)
def test_other_models_push_rows_too(strategy_of):
    trained = train(train_served, strategy_of, partial(torch.optim.SGD, lr=0.1))
    assert num_pushed(trained) < WHOLE
    assert [row["rows"] for row in trained[0].history] == [96.0] * 2


def test_the_tables_cover_all_parameters_once():
    module = Reader()
    params = FlatParams(module, 3)
    tables = ServedTables.of(module, params, SGD(0.1))
    assert tables.names == ["values", "rows of words.weight", "values.1"]
    ends = [(one.start, one.stop) for one in tables._stretches]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == len(params.values)
    for updater in (SGD(0.1, 0.9), SGD(0.1, 0.0, 0.1), Adam(), Adagrad(weight_decay=0.1)):
        assert ServedTables.of(module, params, updater).names == ["values"]
    with pytest.raises(CheckpointError, match="rows of words"):
        tables.check({"values": 1, "values.1": 2})


def test_a_small_embedding_travels_with_the_rest():
    module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    assert ServedTables.of(module, FlatParams(module, 1), SGD(0.1)).names == ["values"]
