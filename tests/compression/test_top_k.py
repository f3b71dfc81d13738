"""The largest part of a gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.compression.top_k import largest, spread


@settings(deadline=None, max_examples=50)
@given(
    numbers=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30), part=st.floats(0, 1)
)
def test_the_largest_are_sent_exactly_and_the_rest_not_at_all(numbers, part):
    flat = torch.tensor(numbers)
    count = max(1, round(part * len(numbers)))
    pairs = largest(flat, count)
    assert pairs.dtype == torch.int32
    assert pairs.shape == (count, 2)
    sent = spread(pairs, torch.zeros_like(flat))
    kept = sent != 0
    assert torch.equal(sent[kept], flat[kept])
    left = flat[sent != flat].abs()
    if len(left):
        assert left.max() <= flat[pairs[:, 0].long()].abs().min()


def test_values_of_several_ranks_add_up():
    total = torch.zeros(4)
    for numbers in ([1.0, -5.0, 0.0, 2.0], [0.0, 3.0, 4.0, 0.0]):
        spread(largest(torch.tensor(numbers), 2), total)
    assert total.tolist() == pytest.approx([0.0, -2.0, 4.0, 2.0])
