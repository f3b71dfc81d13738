"""A forced resume with buckets that are cut differently: state that doesn't fit is reset."""

import re

import pytest
import torch

from sparkdml.comm.threads import run_threads
from sparkdml.compression.half import BF16, FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.compression.top_k import TopK
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import cut, digits, digits_plan, make_reader
from sparkdml.testing.memory_checkpoints import MemoryCheckpoints
from sparkdml.testing.threads import train_on_threads
from sparkdml.training.flat import FlatParams
from sparkdml.training.plan import Schedule

SMALL, LARGE = 600, 1 << 20

LOST = [
    (FP16(), "scales"),
    (OneBit(), "residuals and residuals of sums"),
    (TopK(0.1), "residuals"),
    (PowerSGD(1), "residuals"),
]


def train(checkpoints, epochs, bucket_bytes, scheme):
    """As a forced resume: checkpoints in memory don't ask what has changed."""
    return train_on_threads(
        lambda: AllReduce(bucket_bytes=bucket_bytes, compression=scheme),
        digits_plan(lr=0.1),
        Schedule(epochs, 8),
        cut(digits(60), [30, 30]),
        checkpoints=checkpoints,
    )


def notes_of(training):
    return [event["text"] for event in training.ctx.events if event["kind"] == "note"]


@pytest.mark.parametrize(("before", "after"), [(SMALL, LARGE), (LARGE, SMALL)])
@pytest.mark.parametrize(("scheme", "lost"), LOST, ids=repr)
def test_it_resumes_and_says_what_was_lost(scheme, lost, before, after):
    checkpoints = MemoryCheckpoints()
    train(checkpoints, 1, before, scheme)
    first, second = train(checkpoints, 2, after, scheme)
    assert len(first.history) == 2
    assert torch.equal(first.task.params.values, second.task.params.values)
    (note,) = notes_of(first)
    assert re.search(
        rf"{lost} don't fit the buckets of .*bucket_bytes={after}.* start from zero", note
    )
    assert not notes_of(second), "said once"


@pytest.mark.parametrize("scheme", [FP16(), BF16(), OneBit(), TopK(0.1), PowerSGD(1)], ids=repr)
def test_the_same_buckets_lose_nothing(scheme):
    checkpoints = MemoryCheckpoints()
    train(checkpoints, 1, SMALL, scheme)
    assert not notes_of(train(checkpoints, 2, SMALL, scheme)[0])


def test_schemes_may_change_too():
    checkpoints = MemoryCheckpoints()
    train(checkpoints, 1, SMALL, PowerSGD(1))
    for epochs, scheme, lost in (
        (2, PowerSGD(2), "bases"),
        (3, OneBit(), None),  # which takes over PowerSGD's residuals
        (4, FP16(), None),
        (5, None, None),
        (6, FP16(), None),
    ):
        notes = notes_of(train(checkpoints, epochs, SMALL, scheme)[0])
        assert len(notes) == (lost is not None)
        assert all(f"the checkpoint's {lost} don't fit" in note for note in notes)


def reducer_of(comm, scheme, bucket_bytes):
    params = FlatParams(make_reader(), num_stats=6)
    buckets = params.buckets(bucket_bytes)
    reducer = scheme.reducer(comm, params, buckets)

    def step():
        params.zero()
        params.grads.normal_(std=1e-4)
        params.stats[1] = 4.0
        for work in [reducer.reduce_async_(index) for index in range(len(buckets))]:
            work.wait()

    return reducer, step


def values_of(reducer):
    return {name: entry.value for name, entry in reducer.state().items()}


@pytest.mark.parametrize(("scheme", "lost"), LOST, ids=repr)
def test_what_does_not_fit_is_as_at_the_beginning(scheme, lost):
    def load(comm):
        torch.manual_seed(0)
        trained, step = reducer_of(comm, scheme, SMALL)
        step()
        saved = values_of(trained)
        reducer, step = reducer_of(comm, scheme, LARGE)
        assert " and ".join(reducer.load(saved)) == lost
        for name, value in values_of(reducer).items():
            if "debts" in name:
                assert not any(residual.any() for residual in value)
            elif name == "scales":
                assert set(value) == {1.0}
        if "bases" in saved:  # they belong to parameters, not to buckets
            expected = [base for bases in saved["bases"] for base in bases]
            found = [base for bases in values_of(reducer)["bases"] for base in bases]
            assert len(found) == len(expected) > 0
            assert all(map(torch.equal, found, expected))
        step()

    run_threads(2, load)


def test_as_many_buckets_may_be_others():
    """Their number is that of the checkpoint, and the scales are of other parameters."""

    def load(comm):
        reducer, _ = reducer_of(comm, FP16(), SMALL)
        saved = values_of(reducer)
        saved["scales"] = [2.0] * len(saved["scales"])
        assert not reducer.load(saved)
        assert values_of(reducer) == saved
        other, _ = reducer_of(comm, FP16(), SMALL)
        assert other.load({**saved, "lengths": saved["lengths"][::-1]}) == ["scales"]
        assert set(values_of(other)["scales"]) == {1.0}
        # As earlier versions wrote it.
        assert not other.load({"scales": saved["scales"]})
        assert values_of(other) == saved

    run_threads(1, load)


def test_parts_of_other_buckets_are_lost_though_one_is_as_long():
    def load(comm):
        reducer, step = reducer_of(comm, OneBit(), SMALL)
        step()
        saved = values_of(reducer)
        saved["debts"] = [torch.cat(saved["debts"])]
        assert reducer_of(comm, OneBit(), SMALL)[0].load(saved) == [
            "residuals",
            "residuals of sums",
        ]

    run_threads(2, load)
