"""Sixteen bits: scales that follow the gradient, and sums that overflow all the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdml.comm.threads import ThreadsCommunicator, run_threads
from sparkdml.compression.half import BF16, FP16, next_scale
from sparkdml.training.flat import FlatParams


@settings(deadline=None, max_examples=100)
@given(largest=st.floats(1e-12, 1e12))
def test_a_scale_is_a_power_of_two_that_fills_the_range(largest):
    scale = next_scale(largest, 1.0)
    assert torch.tensor(scale).log2().item() == round(torch.tensor(scale).log2().item())
    assert 2.0**9 <= largest * scale <= 2.0**10


@pytest.mark.parametrize("useless", [0.0, float("inf"), float("nan")])
def test_a_scale_stays_where_there_is_nothing_to_go_by(useless):
    assert next_scale(useless, 8.0) == 8.0


def reduce_all(comm, scheme, steps):
    """What each step's gradient, the same number everywhere, becomes; and the bytes of it."""
    params = FlatParams(nn.Linear(50, 4, bias=False), num_stats=6)
    buckets = params.buckets(1 << 20)
    reducer = scheme.reducer(comm, params, buckets)
    results = []
    for number in steps:
        params.zero()
        params.grads.fill_(number)
        params.stats[0] = 123_457.0  # more digits than half precision has
        before = comm.traffic.bytes
        reducer.reduce_async_(0).wait()
        assert params.stats[0] == 123_457.0 * comm.size
        results.append((params.grads.clone(), comm.traffic.bytes - before))
    return results, reducer.state()


@pytest.mark.parametrize(("scheme", "digits"), [(FP16(), 1e-3), (BF16(), 1e-2)])
def test_half_the_bytes_and_the_same_sum(scheme, digits):
    for results, _ in run_threads(4, lambda comm: reduce_all(comm, scheme, [0.3, 0.01, 0.2])):
        for (sums, num_bytes), expected in zip(results, [1.2, 0.04, 0.8], strict=True):
            assert (sums / expected - 1).abs().max() < digits
            assert num_bytes == pytest.approx(2 * 3 / 4 * (200 * 2 + 6 * 4), abs=4)


def test_small_gradients_are_not_lost_once_the_scale_knows_them():
    """1e-7 is below what float16 can hold, and the second step must not lose it."""
    for results, state in run_threads(2, lambda comm: reduce_all(comm, FP16(), [1e-7] * 2)):
        assert (results[1][0] / 2e-7 - 1).abs().max() < 1e-3
        assert state["scales"].rule == "replicated"


def test_a_sum_that_overflows_is_sent_in_full():
    for results, _ in run_threads(2, lambda comm: reduce_all(comm, FP16(), [1.0, 1e5, 1e4, 1.0])):
        assert [sums[0].item() for sums, _ in results] == pytest.approx([2, 2e5, 2e4, 2], rel=1e-3)
        overflowed, after = results[1][1], results[2][1]
        assert overflowed > 2 * after, "the bucket went twice, once in full"


def test_numbers_that_are_none_stay_none():
    for results, _ in run_threads(2, lambda comm: reduce_all(comm, FP16(), [float("inf"), 1.0])):
        assert results[0][0].isinf().all()
        assert results[1][0][0].item() == 2.0


def test_a_backend_that_would_widen_the_numbers_exchanges_them(monkeypatch):
    """As Horovod would bfloat16: half the bytes all the same."""
    monkeypatch.setattr(ThreadsCommunicator, "carries", lambda self, tensor: tensor.itemsize > 2)
    for results, _ in run_threads(3, lambda comm: reduce_all(comm, BF16(), [0.3])):
        sums, num_bytes = results[0]
        assert (sums / 0.9 - 1).abs().max() < 1e-2
        assert num_bytes < 0.6 * 2 * 2 / 3 * 206 * 4
