"""Thin products: how near they are, and what they cost."""

import pytest
import torch
from torch import nn

from sparkdml.comm.threads import run_threads
from sparkdml.compression.power_sgd import PowerSGD, orthogonal, thin_shape
from sparkdml.training.flat import FlatParams
from sparkdml.training.totals import ROWS


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((100, 50), 2, (100, 50)),
        ((16, 3, 3, 3), 2, (16, 27)),
        ((100,), 2, None),
        ((4, 4), 2, None),  # two of 4 by 2 are as many
        ((4, 0), 1, None),
        ((), 1, None),
    ],
)
def test_matrices_that_get_smaller_are_taken_apart(shape, rank, expected):
    assert thin_shape(shape, rank) == expected


@pytest.mark.parametrize("columns", [torch.randn(9, 3), torch.zeros(9, 3), torch.ones(9, 3)])
def test_a_base_is_orthonormal_whatever_it_is_made_of(columns):
    base = orthogonal(columns)
    torch.testing.assert_close(base.T @ base, torch.eye(3), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(base @ (base.T @ columns), columns, rtol=1e-4, atol=1e-5)


def repeat(comm, rank, matrices, num_steps):
    """The same gradient again and again; the sums, and the bytes of each step."""
    params = FlatParams(nn.Linear(40, 30), num_stats=6)  # the bias comes last
    buckets = params.buckets(1 << 20)
    reducer = PowerSGD(rank).reducer(comm, params, buckets)
    sums = []
    for _ in range(num_steps):
        params.zero()
        params.grads[-30:] = comm.rank + 1.0
        params.grads[:-30] = matrices[comm.rank].flatten()
        params.stats[ROWS] = 8.0
        before = comm.traffic.bytes
        reducer.reduce_async_(0).wait()
        assert params.grads[-30:].tolist() == [3.0] * 30, "a vector travels as it is"
        sums.append(params.grads[:-30].view(30, 40).clone())
    return sums, comm.traffic.bytes - before


def test_a_gradient_of_low_rank_is_exact_at_once():
    torch.manual_seed(0)
    base = torch.randn(30, 2)
    matrices = [base @ torch.randn(2, 40) for _ in range(2)]
    sums, num_bytes = run_threads(2, lambda comm: repeat(comm, 2, matrices, 1))[0]
    torch.testing.assert_close(sums[0], matrices[0] + matrices[1], rtol=1e-3, atol=1e-4)
    assert num_bytes == pytest.approx(4 * (2 * (30 + 40) + 30 + 6), abs=8)


def test_error_feedback_brings_the_rest_in_time():
    torch.manual_seed(0)
    matrices = [torch.randn(30, 40) for _ in range(2)]
    sums, _ = run_threads(2, lambda comm: repeat(comm, 4, matrices, 60))[0]
    mean = torch.stack(sums).mean(0)
    wanted = matrices[0] + matrices[1]
    one_step = (sums[0] - wanted).norm() / wanted.norm()
    assert (mean - wanted).norm() / wanted.norm() < 0.25 * one_step
