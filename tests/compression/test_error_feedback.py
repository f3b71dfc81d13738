"""Residuals are never lost. The contract suite has what holds for every scheme."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.comm.threads import run_threads
from sparkdml.compression.error_feedback import compensate_, with_residual
from sparkdml.compression.half import FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.compression.top_k import TopK
from sparkdml.errors import ParameterError
from sparkdml.strategies.allreduce import AllReduce
from sparkdml.testing.digits import digits_plan, make_reader
from sparkdml.training.flat import FlatParams
from sparkdml.training.plan import Schedule
from sparkdml.training.totals import ROWS
from sparkdml.training.training import TrainingPlan

SCHEMES = [OneBit(), TopK(0.05), PowerSGD(1)]


@settings(deadline=None, max_examples=50)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.floats(-5, 5), min_size=3, max_size=3), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    )
)
def test_what_was_sent_and_the_residual_add_up_to_what_was_wanted(steps):
    """For any way to round: here to whole numbers."""
    residual = torch.zeros(3, dtype=torch.float64)
    for numbers, rows in steps:
        sums = torch.tensor(numbers, dtype=torch.float64) * bool(rows)
        before = residual.clone()
        wanted = with_residual(sums, residual, rows)
        sent = wanted.round()
        compensate_(residual, wanted, sent, rows)
        torch.testing.assert_close(sent + rows * residual, sums + rows * before)
        if not rows:
            assert torch.equal(residual, before)
            assert not sent.any()


def reduce_gradients(comm, scheme, gradients, rows):
    """The sums of each step as this rank has them, and the residuals at the end."""
    torch.manual_seed(0)
    params = FlatParams(make_reader(), num_stats=6)
    buckets = params.buckets(600)
    reducer = scheme.reducer(comm, params, buckets)
    totals = []
    for step, of_ranks in enumerate(gradients):
        params.zero()
        params.grads.copy_(of_ranks[comm.rank])
        params.stats[ROWS] = rows[step][comm.rank]
        params.stats[0] = 0.1 + comm.rank  # what must arrive as it is
        works = [reducer.reduce_async_(index) for index in range(len(buckets))]
        for work in works:
            work.wait()
        totals.append((params.grads.clone(), params.stats.clone()))
    return totals, reducer.state()


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_nothing_is_lost_on_the_way(scheme):
    """All that was sent and all residuals add up to all gradients: with equal batches, for then
    a residual's unit is the same in each step."""
    torch.manual_seed(2)
    count = sum(p.numel() for p in make_reader().parameters())
    gradients, rows = torch.randn(6, 2, count), [[4.0, 4.0]] * 6
    results = run_threads(2, lambda comm: reduce_gradients(comm, scheme, gradients, rows))
    sent = sum(sums for sums, _ in results[0][0])
    residuals = torch.stack([torch.cat(state["debts"].value) for _, state in results]).sum(0) * 4
    if isinstance(scheme, OneBit):  # the owners of the sum's parts have residuals too, in all rows
        by_rank = [state["sum_debts"].value for _, state in results]
        residuals += torch.cat([part for parts in zip(*by_rank, strict=True) for part in parts]) * 8
    torch.testing.assert_close(sent + residuals, gradients.sum((0, 1)), rtol=1e-4, atol=1e-4)
    assert residuals.abs().max() > 0.01, "the scheme sent everything, and this test shows nothing"


def test_residuals_and_a_moving_loss_scale_are_refused():
    def check(compression, precision):
        task = digits_plan(precision=precision)
        strategy = AllReduce(compression=compression)
        strategy.check(TrainingPlan(task, Schedule(1, 8)))

    refused = partial(pytest.raises, ParameterError, match="precision='bf16'")
    for scheme in SCHEMES:
        with refused():
            check(scheme, "fp16")
        check(scheme, "bf16")
    check(FP16(), "fp16")
    check(None, "fp16")


@pytest.mark.parametrize(
    ("scheme", "begins"), [(FP16(), True), (PowerSGD(1), True), (OneBit(), False), (TopK(), False)]
)
def test_an_allreduce_begins_in_backward_and_an_exchange_does_not(scheme, begins):
    """In backward, other ranks may wait for another message of this one (SyncBatchNorm's)."""

    def begin(comm):
        params = FlatParams(make_reader(), num_stats=6)
        buckets = params.buckets(600)
        reducer = scheme.reducer(comm, params, buckets)
        before = comm.traffic.bytes
        first = reducer.reduce_async_(0)
        sent = comm.traffic.bytes - before
        first.wait()
        return sent

    assert [sent > 0 for sent in run_threads(2, begin)] == [begins] * 2
