"""SyncBatchNorm over the communicator: N ranks equal one process on the combined batch."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdml.errors import CommunicationError, ParameterError
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.threads import train_alone, train_on_threads
from sparkdml.training.plan import Schedule
from sparkdml.training.sync_batch_norm import check_batch_norms

sys.path.insert(0, str(Path(__file__).parent))
from objectives import cut, interleave, make_plan

EXACT = {"rtol": 1e-7, "atol": 1e-9}


def make_rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator).double() * 3 + 20  # a mean that cancels badly
    return {"x": x, "y": (x.sum(dim=1) > 60).long()}


def make_net():
    """In doubles: to normalize two rows is to divide by their difference, however small it is."""
    return nn.Sequential(
        nn.Linear(3, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.BatchNorm1d(5, momentum=None),
        nn.Linear(5, 2),
    ).double()


def supervised(**changes):
    fields = {
        "model": make_net,
        "loss": nn.CrossEntropyLoss(),
        "features": ("x",),
        "label": "y",
        "metrics": {},
        "sync_batch_norm": True,
    }
    return make_plan(**{**fields, **changes})


def assert_same(trainings, reference, **tolerance):
    for training in trainings:
        for (name, ours), theirs in zip(
            training.task.module.state_dict().items(), reference.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


@settings(deadline=None, max_examples=8)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=2, max_size=3).filter(
        lambda sizes: any(sizes) and sum(size % 8 for size in sizes) != 1
    ),
    bucket_bytes=st.sampled_from([1, 1 << 20]),
)
def test_ranks_equal_one_process_also_where_they_run_out_of_rows(sizes, bucket_bytes):
    parts = cut(make_rows(sum(sizes)), sizes)
    batches = [*interleave(parts, 8)] * 2
    if any(len(batch["x"]) < 2 for batch in batches):
        return  # a batch of one row can't be normalized
    trainings = train_on_threads(
        lambda: AllReduce(bucket_bytes=bucket_bytes), supervised(), Schedule(2, 8), parts
    )
    assert_same(trainings, train_alone(supervised(), batches), **EXACT)


def test_without_it_the_ranks_would_differ_from_one_process():
    """The test above can fail: these rows differ from rank to rank."""
    rows = make_rows(32)
    order = rows["x"].sum(dim=1).argsort()
    parts = cut({name: value[order] for name, value in rows.items()}, [16, 16])
    reference = train_alone(supervised(), [*interleave(parts, 8)])
    together = train_on_threads(AllReduce, supervised(), Schedule(1, 8), parts)
    assert_same(together, reference, **EXACT)
    apart = train_on_threads(AllReduce, supervised(sync_batch_norm=False), Schedule(1, 8), parts)
    with pytest.raises(AssertionError):
        assert_same(apart, reference, rtol=1e-2, atol=1e-3)


def test_images_in_floats():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.out = nn.Linear(16, 2)

        def forward(self, x):
            return self.out(self.conv(x).flatten(1))

    generator = torch.Generator().manual_seed(0)
    rows = {
        "x": torch.randn(24, 1, 4, 4, generator=generator),
        "y": torch.randint(0, 2, (24,), generator=generator),
    }
    parts = cut(rows, [16, 8])
    plan = supervised(model=Net)
    trainings = train_on_threads(AllReduce, plan, Schedule(2, 8), parts)
    reference = train_alone(plan, [*interleave(parts, 8)] * 2)
    assert_same(trainings, reference, rtol=1e-3, atol=1e-5)


def test_pieces_of_accumulated_batches_may_be_of_different_number():
    """Rank 0 has 3 pieces where rank 1 has 1: it waits, and no rank deadlocks."""
    trainings = train_on_threads(
        AllReduce, supervised(), Schedule(1, 8, accumulate=3), cut(make_rows(30), [24, 6])
    )
    states = [training.task.module.state_dict() for training in trainings]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_validation_uses_the_running_statistics():
    held_out = make_rows(10, seed=3)
    trainings = train_on_threads(
        AllReduce, supervised(), Schedule(1, 8, validates=True), cut(make_rows(32), [16, 16]),
        cut(held_out, [9, 1]),
    )  # fmt: skip
    module = trainings[0].task.module.eval()
    with torch.no_grad():
        expected = nn.CrossEntropyLoss()(module(held_out["x"]), held_out["y"]).item()
    assert trainings[0].history[0]["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_layers_in_another_order_on_another_rank_are_found_out():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.out = nn.Linear(3, 2)
            self.double()

        def forward(self, x):
            first, second = (self.a, self.b) if x[0, 0] > 0 else (self.b, self.a)
            return self.out(second(first(x)))

    rows = make_rows(16)
    rows["x"][8:] *= -1
    with pytest.raises(CommunicationError, match="in different orders"):
        train_on_threads(AllReduce, supervised(model=Fork), Schedule(1, 8), cut(rows, [8, 8]))


def test_what_can_not_be_synchronized_is_refused():
    with pytest.raises(ParameterError, match="Linear has no BatchNorm layer"):
        check_batch_norms(nn.Linear(2, 2))
    with pytest.raises(ParameterError, match="SyncBatchNorm, whose forward is its own"):
        check_batch_norms(nn.Sequential(nn.SyncBatchNorm(2)))
