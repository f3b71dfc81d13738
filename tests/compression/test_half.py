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


def plainly(comm, dtype, grads, scale):
    """What a step makes of a bucket, an operation a line: the sum, and the next scale."""
    small = (grads * scale).to(dtype)
    total = comm.allreduce_(small).float()
    total = total / scale
    if dtype is torch.float16:
        if not torch.isfinite(total).all():
            total = comm.allreduce_(grads.clone())
        scale = next_scale(float(total.abs().max()), scale)
    return total.to(grads.dtype), scale


def awkward_steps(comm, count):
    """Gradients of this rank, step by step; each kind comes with whatever scale the last left."""
    generator = torch.Generator().manual_seed(comm.rank)
    plain = torch.randn(count, generator=generator)

    def with_one(number, only_on=None):
        step = plain.clone()
        if only_on in (None, comm.rank):
            step[count // 2] = number
        return step

    inf, nan = float("inf"), float("nan")
    return [
        plain,
        plain,
        plain * 1e-9,
        plain * 1e-9,
        plain * 1e-42,  # subnormal
        plain,  # overflows, as the scale is still that of small ones
        torch.zeros(count),
        -torch.zeros(count),
        plain * 1e30,
        plain * 1e30,
        plain * 1e-3,
        with_one(inf),
        with_one(-inf),
        with_one(inf if comm.rank else -inf),
        with_one(inf, only_on=1),
        plain,
        with_one(nan),
        with_one(nan, only_on=0),
        with_one(1e38),
        with_one(3e38 if comm.rank else -3e38),
        plain,
        torch.full((count,), 40_000.0),
        torch.full((count,), 65_504.0),
    ]


@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scheme", [FP16(), BF16()], ids=repr)
def test_the_bits_are_those_of_plain_operations(scheme, parameters):
    """With memory that is shared by buckets of different length, all of them under way at once."""
    dtype = torch.float16 if scheme == FP16() else torch.bfloat16
    bits = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}

    def compare(comm):
        module = nn.Sequential(nn.Linear(90, 11), nn.Linear(11, 16), nn.Linear(16, 48))
        params = FlatParams(module.to(parameters), num_stats=6)
        buckets = params.buckets(500)
        assert sum(bucket.num_parameters > 0 for bucket in buckets) > 2
        reducer = scheme.reducer(comm, params, buckets)
        scales = [1.0] * len(buckets)
        for number, step in enumerate(awkward_steps(comm, params.grads.numel())):
            params.zero()
            params.grads.copy_(step)
            expected = []
            for index, bucket in enumerate(buckets):
                if bucket.num_parameters:
                    total, scales[index] = plainly(comm, dtype, bucket.grads, scales[index])
                    expected.append(total)
            for work in [reducer.reduce_async_(index) for index in range(len(buckets))]:
                work.wait()
            sums, expected = params.grads, torch.cat(expected)
            assert torch.equal(sums.isnan(), expected.isnan()), number
            view, is_number = bits[parameters], ~expected.isnan()  # NaN has many bit patterns
            assert torch.equal(sums.view(view)[is_number], expected.view(view)[is_number]), number
            if scheme == FP16():
                assert reducer.state()["scales"].value == scales, number

    run_threads(2, compare)


@pytest.mark.parametrize("scheme", [FP16(), BF16()], ids=repr)
def test_each_step_sends_from_the_same_memory(scheme):
    def send(comm):
        sent = []
        allreduce = comm.allreduce_async_

        def remember(tensor, op="sum"):
            sent.append(tensor)  # kept, so that no memory is given out twice
            return allreduce(tensor, op)

        comm.allreduce_async_ = remember
        params = FlatParams(nn.Sequential(nn.Linear(50, 4), nn.Linear(4, 4)), num_stats=6)
        buckets = params.buckets(200)
        reducer = scheme.reducer(comm, params, buckets)
        for _ in range(4):
            params.grads.fill_(0.1)
            for work in [reducer.reduce_async_(index) for index in range(len(buckets))]:
                work.wait()
        small = [tensor for tensor in sent if tensor.itemsize == 2]
        assert len(small) == 4 * len(buckets)
        return len({tensor.data_ptr() for tensor in small}) == len(buckets) > 1

    assert all(run_threads(2, send))


def test_an_exchange_in_the_place_of_a_wider_allreduce_sends_no_sizes_ahead(monkeypatch):
    monkeypatch.setattr(ThreadsCommunicator, "carries", lambda self, tensor: tensor.itemsize > 2)
    given = []
    for name in ("allgather", "alltoall"):
        monkeypatch.setattr(ThreadsCommunicator, name, remembering(name, given))
    run_threads(3, lambda comm: reduce_all(comm, BF16(), [0.3]))
    assert sorted(given) == sorted([("allgather", (67, 67, 66))] * 3 + alltoalls(67, 67, 66))


def alltoalls(*lengths):
    return [("alltoall", (length,) * len(lengths)) for length in lengths]


def remembering(name, given):
    method = getattr(ThreadsCommunicator, name)

    def call(self, what, lengths=None):
        given.append((name, tuple(lengths)))
        return method(self, what, lengths)

    return call
