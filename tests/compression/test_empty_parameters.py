"""A parameter without elements may fill a bucket alone: there is nothing to send of it."""

import pytest
import torch
from torch import nn

from sparkdml.comm.threads import run_threads
from sparkdml.compression.half import BF16, FP16
from sparkdml.compression.one_bit import OneBit
from sparkdml.compression.power_sgd import PowerSGD
from sparkdml.compression.top_k import TopK
from sparkdml.training.flat import FlatParams
from sparkdml.training.totals import ROWS

SCHEMES = [FP16(), BF16(), OneBit(), TopK(1.0), PowerSGD(2)]


class Empty(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(*shape))


def with_empty_ones():
    """Between large parameters and at both ends; vectors and matrices."""
    return nn.Sequential(
        Empty(0), nn.Linear(64, 32), Empty(0, 7), Empty(3, 0), nn.Linear(32, 10), Empty(0)
    )


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_there_is_nothing_to_send_of_it(scheme, bucket_bytes):
    def reduce_steps(comm):
        params = FlatParams(with_empty_ones(), num_stats=6)
        buckets = params.buckets(bucket_bytes)
        empty = [index for index, bucket in enumerate(buckets) if not bucket.tensor.numel()]
        assert len(empty) == (2 if bucket_bytes == 64 else 0)
        reducer = scheme.reducer(comm, params, buckets)
        for _ in range(2):
            params.zero()
            params.grads.fill_(0.5)
            params.stats[ROWS] = 4.0
            for index in range(len(buckets)):
                before = comm.traffic.messages
                reducer.reduce_async_(index).wait()
                assert (comm.traffic.messages == before) == (index in empty)
            torch.testing.assert_close(params.grads, torch.ones_like(params.grads))
            assert params.stats[ROWS] == 8.0
        return [entry.value for entry in reducer.state().values()]

    run_threads(2, reduce_steps)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_stats_behind_nothing_else_are_summed(scheme):
    """The last bucket may have stats, and an empty parameter alone before them."""

    def reduce_once(comm):
        params = FlatParams(nn.Sequential(Empty(0), nn.Linear(16, 16, bias=False)), num_stats=6)
        buckets = params.buckets(64)
        assert [bucket.grads.numel() for bucket in buckets] == [256, 0]
        params.grads.fill_(0.5)
        params.stats.fill_(comm.rank + 1.0)
        reducer = scheme.reducer(comm, params, buckets)
        for work in [reducer.reduce_async_(index) for index in range(2)]:
            work.wait()
        assert params.stats.tolist() == [3.0] * 6

    run_threads(2, reduce_once)
