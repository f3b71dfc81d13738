"""AllReduce on threads: N ranks equal one process with the combined batch."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdml.comm.topologies.opening import TOPOLOGIES, open_topology
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.top_k import TopK
from sparkdml.errors import NonFiniteLoss, ParameterError
from sparkdml.feed.feed import ReadAhead
from sparkdml.runtime.worker import tracing
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import combined_batches, cut, digits, digits_plan
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.callbacks import Callback, EarlyStopping
from sparkdml.training.plan import Schedule
from sparkdml.training.task import TaskPlan


def make_plan(**changes):
    fields = {
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "features": ("x",),
        "label": "y",
        "metrics": {"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
        "batch_size": 8,
    }
    return TaskPlan(**{**fields, **changes})


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return {"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()}


def assert_same(trainings, reference, **tolerance):
    for training in trainings:
        for ours, theirs in zip(
            training.task.module.state_dict().values(), reference.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, **tolerance)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    bucket_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_ranks_equal_one_process(sizes, bucket_bytes):
    parts = cut(make_rows(sum(sizes)), sizes)
    plan = make_plan()
    trainings = train_on_threads(
        lambda: AllReduce(bucket_bytes=bucket_bytes), plan, Schedule(2, 8), parts
    )
    reference = train_alone(plan, [*combined_batches(parts, 8)] * 2)
    assert_same(trainings, reference, rtol=1e-4, atol=1e-6)
    first = trainings[0].history[0]
    assert first["rows"] == sum(sizes)
    assert all(training.history[0]["loss"] == first["loss"] for training in trainings)


def test_metrics_are_means_over_rows_not_over_ranks():
    parts = cut(make_rows(50), [40, 10])
    plan = make_plan(optimizer=partial(torch.optim.SGD, lr=0.0))
    trainings = train_on_threads(AllReduce, plan, Schedule(1, 8), parts)
    outputs = trainings[0].task.module(make_rows(50)["x"])
    row = trainings[0].history[0]
    expected = (outputs.argmax(1) == make_rows(50)["y"]).float().mean().item()
    assert row["accuracy"] == pytest.approx(expected)
    loss = nn.CrossEntropyLoss()(outputs, make_rows(50)["y"]).item()
    assert row["loss"] == pytest.approx(loss, rel=1e-5)


def test_accumulation_equals_a_larger_batch():
    parts = cut(make_rows(64), [40, 24])
    plan = make_plan()
    trainings = train_on_threads(AllReduce, plan, Schedule(1, 8, accumulate=3), parts)
    assert_same(trainings, train_alone(plan, [*combined_batches(parts, 24)]), rtol=1e-4, atol=1e-6)
    assert trainings[0].history[0]["steps"] == 2


def test_overlap_waits_for_the_last_piece_of_an_accumulated_batch():
    parts = cut(make_rows(64), [40, 24])
    plan = make_plan()
    trainings = train_on_threads(
        lambda: AllReduce(bucket_bytes=1), plan, Schedule(1, 8, accumulate=3), parts
    )
    assert_same(trainings, train_alone(plan, [*combined_batches(parts, 24)]), rtol=1e-4, atol=1e-6)


def test_clipping_is_of_the_agreed_gradient():
    parts = cut(make_rows(48), [30, 18])
    plan = make_plan(clip_norm=0.05)
    trainings = train_on_threads(AllReduce, plan, Schedule(1, 8), parts)
    reference = train_alone(plan, [*combined_batches(parts, 8)], clip_norm=0.05)
    assert_same(trainings, reference, rtol=1e-4, atol=1e-6)


def test_a_parameter_that_takes_no_part_changes_nothing():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    parts = cut(make_rows(32), [20, 12])
    plan = make_plan(model=Partial)
    trainings = train_on_threads(lambda: AllReduce(bucket_bytes=1), plan, Schedule(1, 8), parts)
    assert_same(trainings, train_alone(plan, [*combined_batches(parts, 8)]), rtol=1e-4, atol=1e-6)


def test_class_weights_are_exact_over_ranks():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))
    parts = cut(make_rows(48), [30, 18])
    plan = make_plan(loss=loss)
    trainings = train_on_threads(AllReduce, plan, Schedule(1, 8), parts)
    assert_same(trainings, train_alone(plan, [*combined_batches(parts, 8)]), rtol=1e-4, atol=1e-6)


def test_batchnorm_statistics_are_merged_by_rows():
    plan = make_plan(model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    trainings = train_on_threads(AllReduce, plan, Schedule(1, 8), cut(make_rows(48), [48, 0]))
    alone = train_on_threads(AllReduce, plan, Schedule(1, 8), [make_rows(48)])
    assert_same(trainings, alone[0].task.module)  # the rank without rows has no say


def test_validation_is_over_all_ranks():
    held_out = cut(make_rows(30, seed=5), [25, 5])
    plan = make_plan()
    trainings = train_on_threads(
        AllReduce, plan, Schedule(1, 8, validates=True), cut(make_rows(32), [16, 16]), held_out
    )
    module = trainings[0].task.module
    rows = make_rows(30, seed=5)
    expected = nn.CrossEntropyLoss()(module(rows["x"]), rows["y"]).item()
    assert trainings[0].history[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert module.training


@pytest.mark.parametrize("restore_best", [False, True])
def test_early_stopping_is_the_same_on_every_rank(restore_best):
    class Worsens(Callback):
        """Makes the third epoch the best, and keeps what the weights were then."""

        def __init__(self):
            self.states = {}

        def on_epoch_end(self, training, row):
            row["score"] = abs(row["epoch"] - 3)
            if row["epoch"] == 3:
                self.states[training.ctx.rank] = training.task.params.values.clone()

    worsens = Worsens()
    stopping = [EarlyStopping("score", patience=1, restore_best=restore_best) for _ in range(2)]

    class PerRank(Callback):
        """Threads share callbacks; in a cluster every rank has its own."""

        def on_epoch_end(self, training, row):
            stopping[training.ctx.rank].on_epoch_end(training, row)

        def on_run_end(self, training):
            stopping[training.ctx.rank].on_run_end(training)

    trainings = train_on_threads(
        AllReduce,
        make_plan(),
        Schedule(10, 8),
        cut(make_rows(32), [16, 16]),
        callbacks=[worsens, PerRank()],
    )
    for training in trainings:
        assert len(training.history) == 5
        assert "score was best in epoch 3" in training.stopped
        restored = torch.equal(training.task.params.values, worsens.states[training.ctx.rank])
        assert restored == restore_best


def test_a_nan_is_reported_with_step_and_rank():
    rows = make_rows(64)
    rows["x"][45] = float("nan")  # the second step of rank 1
    with pytest.raises(NonFiniteLoss, match=r"nan at step 2 \(epoch 1\) on rank 1"):
        train_on_threads(AllReduce, make_plan(), Schedule(1, 8), cut(rows, [32, 32]))


def test_an_optimizer_that_drops_gradients_is_found_out():
    class Clears(nn.Linear):
        def forward(self, x):
            self.weight.grad = None
            return super().forward(x)

    with pytest.raises(ParameterError, match="replaces or clears"):
        train_on_threads(
            AllReduce, make_plan(model=lambda: Clears(4, 3)), Schedule(1, 8), [make_rows(8)]
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"backend": "pigeons"}, "backend"), ({"bucket_bytes": 0}, "bucket_bytes")],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ParameterError, match=words):
        AllReduce(**arguments)


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "shared-memory"])
def test_every_topology_equals_one_process(topology):
    parts = cut(make_rows(70), [30, 24, 16])
    plan = make_plan()
    trainings = train_on_threads(
        lambda: AllReduce(topology=topology, bucket_bytes=64), plan, Schedule(1, 8), parts
    )
    reference = train_alone(plan, [*combined_batches(parts, 8)])
    assert_same(trainings, reference, rtol=1e-4, atol=1e-6)
    first = trainings[0].task.params.values
    assert all(torch.equal(training.task.params.values, first) for training in trainings)
    told = [event for event in trainings[0].ctx.events if event["kind"] == "topology"]
    assert [event["asked"] for event in told] == [topology]
    assert topology == "auto" or told[0]["used"] == topology


def test_a_rank_that_raises_releases_the_others_whatever_the_topology():
    class Raises(Callback):
        def on_step_end(self, training):
            if training.ctx.rank == 1:
                raise KeyError("the user's own")

    parts = cut(make_rows(48), [24, 24])
    with pytest.raises(KeyError):
        train_on_threads(
            lambda: AllReduce(topology="ring"), make_plan(), Schedule(1, 8), parts, None, [Raises()]
        )


def test_an_unknown_topology_is_refused():
    with pytest.raises(ParameterError, match="topology must be one of 'auto', 'native', 'ring'"):
        AllReduce(topology="star")


@pytest.mark.parametrize("compression", [OneBit(), TopK(0.5)])
def test_an_exchange_of_its_own_opens_no_other_topology(compression, monkeypatch):
    opened = []

    def open_and_note(name, comm):
        opened.append(name)
        return open_topology(name, comm)

    monkeypatch.setattr(tracing, "open_topology", open_and_note)
    train_on_threads(
        lambda: AllReduce(compression=compression),
        make_plan(),
        Schedule(1, 8),
        cut(make_rows(32), [16, 16]),
    )
    assert opened == ["native"] * 2


class Notes(AllReduce):
    """Writes down when it reads a batch, sends a gradient, and has the sum."""

    def batches(self, training, epoch):
        self.notes = []
        self._batches = ReadAhead(self._noted(super().batches(training, epoch)), training.reading)
        return self._batches

    def _noted(self, batches):
        for batch in batches:
            self.notes.append("read")
            yield batch

    def _send_next(self):
        self.notes.append("send")
        super()._send_next()

    def agree(self, task):
        totals = super().agree(task)
        self.notes.append("sum")
        return totals


def test_the_next_batch_is_read_while_gradients_are_under_way():
    trainings = train_on_threads(
        Notes, digits_plan(lr=0.1), Schedule(1, 8), cut(digits(32), [16, 16])
    )
    for training in trainings:
        first, second, end = ["read", "send", "read", "sum"], ["send", "sum"], ["send", "sum"]
        assert training.ctx.strategy.notes == [*first, *second, *end]
