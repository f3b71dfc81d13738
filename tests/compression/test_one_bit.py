"""One bit a number: columns, bits and means, and what really travels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdml.comm.base import reduce_in_rank_order
from sparkdml.comm.threads import run_threads
from sparkdml.compression import one_bit
from sparkdml.compression.base import Uncompressed
from sparkdml.compression.one_bit import (
    Columns,
    OneBit,
    column_lengths,
    cut_evenly,
    pack,
    pack_with_torch,
    unpack,
    unpack_with_torch,
)
from sparkdml.training.flat import FlatParams
from sparkdml.training.totals import ROWS


@settings(deadline=None, max_examples=100)
@given(shape=st.lists(st.integers(0, 70), min_size=0, max_size=4))
def test_columns_cover_a_parameter_and_bits_are_most_of_what_is_sent(shape):
    shape = torch.Size(shape)
    lengths = column_lengths(shape)
    assert sum(lengths) == shape.numel()
    assert all(0 < length <= one_bit.MAX_COLUMN for length in lengths)
    short = [length for length in lengths if length < one_bit.MIN_COLUMN]
    assert len(short) <= max(1, sum(length == one_bit.MAX_COLUMN for length in lengths))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 1000), [1000] * 3),  # a column each
        ((5, 100), [300, 200]),  # three columns together
        ((10,), [10]),
        ((2, 3, 20_000), [8192] * 7 + [2656] + [8192] * 7 + [2656]),
        ((), [1]),
        ((0, 7), []),
    ],
)
def test_columns_are_those_of_the_units(shape, expected):
    assert column_lengths(torch.Size(shape)) == expected


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 50), max_size=30), size=st.integers(1, 9))
def test_parts_are_even_up_to_a_column(lengths, size):
    parts = cut_evenly(lengths, size)
    assert len(parts) == size
    assert [length for part in parts for length in part] == lengths
    longest = max(lengths, default=0)
    assert all(sum(part) <= sum(lengths) / size + longest for part in parts)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), max_size=40))
def test_bits_survive_packing(bits):
    tensor = torch.tensor(bits, dtype=torch.bool)
    assert len(pack(tensor)) == -(-len(bits) // 8)
    assert unpack(pack(tensor), len(bits)).tolist() == bits
    # As on a GPU, which has no numpy.
    assert torch.equal(pack_with_torch(tensor), pack(tensor))
    assert unpack_with_torch(pack(tensor), len(bits)).tolist() == bits


@settings(deadline=None, max_examples=50)
@given(
    columns=st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9), min_size=1, max_size=6
    )
)
def test_each_sign_of_a_column_becomes_its_mean(columns):
    of = Columns([len(column) for column in columns])
    flat = torch.tensor([number for column in columns for number in column])
    message = of.write(3.0, *of.quantise(flat))
    rows, restored = of.read(message)
    assert rows == 3.0
    assert len(message) == 4 + 4 * len(columns) + -(-len(flat) // 8)
    expected = []
    for column in columns:
        above = [number for number in column if number >= 0]
        below = [number for number in column if number < 0]
        mean_above = sum(above) / max(1, len(above))
        mean_below = sum(below) / max(1, len(below))
        expected += [mean_above if number >= 0 else mean_below for number in column]
    torch.testing.assert_close(restored, torch.tensor(expected), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_it_sends_less_than_a_twenty_fifth_of_the_bytes(size):
    """On a model of a million parameters, counted where they leave the rank, stats and all."""

    def send(comm, compress):
        torch.manual_seed(comm.rank)
        params = FlatParams(nn.Sequential(nn.Linear(784, 1000), nn.Linear(1000, 215)), num_stats=7)
        assert params.grads.numel() == 1_000_215
        params.grads.normal_()
        params.stats[ROWS] = 32.0
        buckets = params.buckets(8 << 20)
        make = (
            OneBit().reducer if compress else lambda comm, _, buckets: Uncompressed(comm, buckets)
        )
        reducer = make(comm, params, buckets)
        before = comm.traffic.bytes
        works = [reducer.reduce_async_(index) for index in range(len(buckets))]
        for work in works:
            work.wait()
        return comm.traffic.bytes - before

    plain = run_threads(size, lambda comm: send(comm, False))
    ours = run_threads(size, lambda comm: send(comm, True))
    assert sum(plain) == pytest.approx(2 * (size - 1) * 4 * 1_000_222, rel=1e-5)
    assert sum(ours) < sum(plain) / 25
    assert max(ours) < max(plain) / 25


@pytest.mark.parametrize("parameters", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_a_bucket_is_two_collectives_without_sizes_ahead(size, parameters):
    """And the stats are in them, to the last bit, unless they are a bucket of their own."""

    def send(comm):
        called = []
        for name in ("allgather", "alltoall", "allreduce_async_"):
            counted(comm, name, called)
        module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).to(parameters)
        params = FlatParams(module, num_stats=7)
        buckets = params.buckets(3000)
        assert len(buckets) > 1
        reducer = OneBit().reducer(comm, params, buckets)
        params.stats.copy_(torch.tensor([0.1 + comm.rank, 32, 1e-30, 0, 0, 7, -1 / 3]))
        own = params.stats.clone()
        for work in [reducer.reduce_async_(index) for index in range(len(buckets))]:
            work.wait()
        counted_bytes, counted_messages = comm.traffic.bytes, comm.traffic.messages
        with_gradients = [bucket for bucket in buckets if bucket.num_parameters]
        expected = ["alltoall", "allgather"] * len(with_gradients)
        if len(with_gradients) < len(buckets):
            expected.insert(0, "allreduce_async_")  # it began before any rank waited
        else:
            assert counted_messages == 2 * (size - 1) * len(buckets)
            assert counted_bytes == (size - 1) * own.nbytes + bytes_of_parts(
                buckets, size, comm.rank
            )
        assert called == expected
        return own, params.stats.clone()

    results = run_threads(size, send)
    expected = reduce_in_rank_order([own for own, _ in results], "sum")
    assert all(torch.equal(stats, expected) for _, stats in results)


def bytes_of_parts(buckets, size, rank):
    """Each other rank's part once, and the own part to each of them."""
    total = 0
    for bucket in buckets:
        lengths = [length for shape in bucket.shapes for length in column_lengths(shape)]
        sizes = [4 + 4 * len(part) + -(-sum(part) // 8) for part in cut_evenly(lengths, size)]
        total += sum(sizes) - sizes[rank] + (size - 1) * sizes[rank]
    return total


def counted(comm, name, called):
    method = getattr(comm, name)

    def call(*args, **options):
        called.append(name)
        if name != "allreduce_async_":
            assert len(args) == 2, "the lengths"
        return method(*args, **options)

    setattr(comm, name, call)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 50), max_size=9))
def test_the_length_of_a_message_is_known_beforehand(lengths):
    columns = Columns(lengths)
    flat = torch.randn(sum(lengths))
    assert len(columns.write(1.0, *columns.quantise(flat))) == columns.num_bytes
