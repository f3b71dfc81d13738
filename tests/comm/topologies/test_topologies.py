"""Every topology gives the sum, the same bits on every rank, and sends what its formula says."""

from __future__ import annotations

from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.comm.base import IN_PLACE, reduce_in_rank_order
from sparkdml.comm.threads import run_threads
from sparkdml.comm.topologies import tree as tree_module
from sparkdml.comm.topologies.classic.double_tree import double_tree, parents, places
from sparkdml.comm.topologies.classic.halving_doubling import halving_doubling
from sparkdml.comm.topologies.classic.ring import ring
from sparkdml.comm.topologies.tree import binomial, tree

TOPOLOGIES = {"ring": ring, "tree": tree, "double": double_tree, "halving": halving_doubling}
SIZES = range(1, 10)


def reduced_by(topology, inputs, op="sum"):
    """Every rank's result, and what it sent."""

    def on_rank(comm):
        tensor = inputs[comm.rank].clone()
        topology(comm.point_to_point, comm.rank, comm.size, tensor, IN_PLACE[op])
        return tensor, comm.traffic

    return zip(*run_threads(len(inputs), on_rank), strict=True)


def inputs_of(size, length, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("name", TOPOLOGIES)
@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 9), length=st.integers(0, 70), seed=st.integers(0, 1000))
def test_the_sum_is_that_of_float64_and_the_same_everywhere(name, size, length, seed):
    inputs = inputs_of(size, length, seed=seed)
    results, _ = reduced_by(TOPOLOGIES[name], inputs)
    torch.testing.assert_close(
        results[0].double(), sum(tensor.double() for tensor in inputs), rtol=1e-5, atol=1e-5
    )
    assert all(torch.equal(result, results[0]) for result in results)
    again, _ = reduced_by(TOPOLOGIES[name], inputs)
    assert torch.equal(again[0], results[0])


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("op", ["min", "max", "product"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
def test_every_op_and_dtype(name, op, dtype):
    inputs = [(1 + torch.arange(7) % 3 + rank % 2).to(dtype) for rank in range(5)]
    results, _ = reduced_by(TOPOLOGIES[name], inputs, op)
    for result in results:
        assert torch.equal(result, reduce_in_rank_order(inputs, op))


@pytest.mark.parametrize("name", ["tree", "double"])
def test_a_long_tensor_goes_in_segments(name, monkeypatch):
    monkeypatch.setattr(tree_module, "SEGMENT_BYTES", 64)
    inputs = inputs_of(6, 101)
    results, traffic = reduced_by(TOPOLOGIES[name], inputs)
    torch.testing.assert_close(results[3], sum(inputs))
    assert all(torch.equal(result, results[0]) for result in results)
    assert sum(each.bytes for each in traffic) == 2 * 5 * 101 * 4
    assert sum(each.messages for each in traffic) > 2 * 5 * 2


@pytest.mark.parametrize("size", SIZES)
def test_what_a_ring_sends(size):
    total = 4 * 9 * 8 * 7 * 5  # divisible by every size
    _, traffic = reduced_by(ring, inputs_of(size, total // 4))
    for each in traffic:
        assert each.bytes == 2 * (size - 1) * total // size
        assert each.messages == 2 * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_what_halving_and_doubling_sends(size):
    total = 4 * 16
    _, traffic = reduced_by(halving_doubling, inputs_of(size, total // 4))
    power = 2 ** int(log2(size))
    for rank, each in enumerate(traffic):
        if rank >= power:  # folded: gives its tensor away, and gets the result from its partner
            assert (each.bytes, each.messages) == (total, 1)
            continue
        is_partner = rank + power < size
        assert each.bytes == 2 * (power - 1) * total // power + is_partner * total
        assert each.messages == 2 * log2(power) + is_partner


@pytest.mark.parametrize("size", SIZES)
def test_what_trees_send(size):
    total = 4 * 16
    _, traffic = reduced_by(tree, inputs_of(size, total // 4))
    for rank, each in enumerate(traffic):
        place = binomial(rank, size)
        up = place.parent is not None
        assert each.messages == up + len(place.children)
        assert each.bytes == each.messages * total
    _, traffic = reduced_by(double_tree, inputs_of(size, total // 4))
    assert sum(each.bytes for each in traffic) == 2 * (size - 1) * total
    assert max(each.bytes for each in traffic) <= 2 * total


@pytest.mark.parametrize("size", SIZES)
def test_trees_reach_every_rank_in_log_depth(size):
    def depth(rank, parent_of):
        return 0 if parent_of[rank] is None else 1 + depth(parent_of[rank], parent_of)

    for rank in range(size):
        for index in (0, 1):
            parent = places(rank, size)[index].parent
            assert parent is None or rank in places(parent, size)[index].children
        parent = binomial(rank, size).parent
        assert parent is None or rank in binomial(parent, size).children
        both = places(rank, size)
        assert size < 3 or not (both[0].children and both[1].children), "inside one tree only"
    binomials = [binomial(rank, size).parent for rank in range(size)]
    for parent_of in (parents(size), binomials):
        assert parent_of.count(None) == 1
        assert max(depth(rank, parent_of) for rank in range(size)) <= size.bit_length()
