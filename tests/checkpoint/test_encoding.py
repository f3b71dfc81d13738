"""State to bytes and back: every bit, and nothing that could run."""

import copy
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdml.checkpoint.encoding import Stream, decode, take_apart
from sparkdml.checkpoint.state import Entry, merge
from sparkdml.checkpoint.writer import Staging
from sparkdml.errors import CheckpointError


def round_trip(state):
    return decode(b"".join(Stream(*take_apart(state))), "here")


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and torch.equal(one, other) and one.dtype == other.dtype
        )
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other) and one.dtype == other.dtype
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5)
)  # fmt: skip
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(value=nested, rule=st.sampled_from(["replicated", "mean", "sum", "reset"]))
def test_any_plain_value_survives_a_round_trip(value, rule):
    entry = round_trip({"it": Entry(value, rule, 0.5)})["it"]
    assert same(entry.value, value)
    assert (entry.rule, entry.weight) == (rule, 0.5)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
     torch.bool, torch.complex64],
)  # fmt: skip
def test_tensors_of_every_type(dtype):
    for tensor in (
        torch.ones(3, 2).to(dtype),
        torch.zeros(()).to(dtype),
        torch.empty(0, 4).to(dtype),
    ):
        assert same(round_trip({"t": Entry(tensor)})["t"].value, tensor)


def test_the_file_is_safetensors(tmp_path):
    path = tmp_path / "state.safetensors"
    weight = torch.randn(4, 3)
    path.write_bytes(b"".join(Stream(*take_apart({"parameters": Entry({"a.weight": weight})}))))
    assert torch.equal(safetensors.torch.load_file(path)["parameters.a.weight"], weight)


def test_views_and_transposed_tensors():
    base = torch.arange(12.0).reshape(3, 4)
    state = {"t": Entry([base.t(), base[1:, ::2]])}
    skeleton, tensors = take_apart(state)
    copied = Staging().copy(tensors)
    content = b"".join(Stream(skeleton, copied))
    assert same(decode(content, "here")["t"].value, [base.t().clone(), base[1:, ::2].clone()])


def test_tied_tensors_are_written_once():
    shared = torch.randn(1000)
    one = Stream(*take_apart({"t": Entry({"a": shared, "b": shared})})).num_bytes
    assert one < 2 * shared.numel() * 4


def test_optimizer_states_load_again():
    module = torch.nn.Linear(3, 3)
    for kind in (torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad):
        optimizer = kind(module.parameters(), lr=0.1)
        module(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        saved = round_trip({"o": Entry(optimizer.state_dict())})["o"].value
        other = kind(module.parameters(), lr=0.5)
        other.load_state_dict(saved)
        assert same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("value", [open, {1, 2}, object(), {(1, 2): 3}, torch.nn.Linear(1, 1)])
def test_what_cant_be_saved_is_named_by_its_path(value):
    with pytest.raises(CheckpointError, match=r"'callbacks\.1\.best'.*no checkpoint can hold"):
        take_apart({"callbacks": Entry([{}, {"best": value}])})


def test_a_sparse_tensor_is_refused():
    with pytest.raises(CheckpointError, match="sparse"):
        take_apart({"t": Entry(torch.eye(3).to_sparse())})


@settings(deadline=None, max_examples=100)
@given(cut=st.integers(0, 400))
def test_a_cut_file_is_damaged(cut):
    content = b"".join(Stream(*take_apart({"t": Entry({"x": torch.ones(64), "n": 3})})))
    if cut < len(content):
        with pytest.raises(CheckpointError, match="damaged"):
            decode(content[:cut], "here")


def test_staging_uses_its_memory_again():
    staging = Staging()
    first = staging.copy({"t": torch.ones(5)})["t"].data_ptr()
    again = staging.copy({"t": torch.full((5,), 2.0)})["t"]
    assert again.data_ptr() == first
    assert again.tolist() == [2.0] * 5
    assert staging.copy({"t": torch.ones(6)})["t"].shape == (6,)


def test_merging_by_rule():
    ranks = [
        {
            "buffers": Entry(
                {"mean": torch.full((2,), float(rank)), "count": torch.tensor(7 + rank)},
                "mean",
                weight,
            ),
            "position": Entry(np.array([rank, 2]), "sum"),
            "random": Entry([rank], "reset"),
        }
        for rank, weight in ((0, 10.0), (1, 30.0))
    ]  # fmt: skip
    merged = merge(ranks)
    assert merged["buffers"].value["mean"].tolist() == [0.75, 0.75]
    assert merged["buffers"].value["count"].item() == 7, "whole numbers are rank 0's"
    assert merged["position"].value.tolist() == [1, 4]
    assert "random" not in merged
    weightless = [{"b": Entry(torch.tensor([float(r)]), "mean", 0.0)} for r in (0, 1)]
    assert merge(weightless)["b"].value.tolist() == [0.5]


def test_a_mean_is_of_those_who_have_a_key():
    """The optimizer of a rank without rows has no momentum yet."""
    values = [{}, {"momentum": 1.0, "lr": 0.1}, {"momentum": 4.0, "lr": 0.1}]
    ranks = [
        {"o": Entry(value, "mean", w)} for value, w in zip(values, (5.0, 1.0, 2.0), strict=True)
    ]
    assert merge(ranks)["o"].value == pytest.approx({"momentum": 3.0, "lr": 0.1})
    summed = [{"o": Entry(value, "sum")} for value in ({"a": 1.0}, {"a": 2.0, "b": 3.0})]
    assert merge(summed)["o"].value == {"a": 3.0, "b": 3.0}
    unweighed = [{"o": Entry(value, "mean", w)} for value, w in (({}, 1.0), ({"a": 2.0}, 0.0))]
    assert merge(unweighed)["o"].value == {"a": 2.0}


def test_ranks_of_no_weight_spoil_nothing():
    """Nothing times infinity would be no number: masks and rates may be infinite."""
    kinds = (float, torch.tensor, np.array)
    infinite, broken = -math.inf, math.nan
    for make in kinds:
        ranks = [{"b": Entry(make(v), "mean", w)} for v, w in ((infinite, 5.0), (broken, 0.0))]
        assert float(merge(ranks)["b"].value) == infinite
    counts = [{"n": Entry(number, "mean", w)} for number, w in ((3, 0.0), (4, 2.0))]
    assert merge(counts)["n"].value == 3, "whole numbers are rank 0's"


def test_the_mean_of_equal_values_is_that_value_to_the_bit():
    number = 0.028  # of which no mean would be the same if it were computed
    for value in (number, torch.tensor([number, -math.inf]).double(), np.array([number, 1e308])):
        for size in (2, 3, 7):
            ranks = [{"b": Entry(copy.copy(value), "mean", 1.0 + r)} for r in range(size)]
            assert np.array_equal(merge(ranks)["b"].value, value)
    summed = [{"b": Entry(value, "sum")} for value in (2.0, 2.0)]
    assert merge(summed)["b"].value == 4.0


@settings(deadline=None, max_examples=50)
@given(order=st.permutations(range(4)), values=st.lists(st.floats(-9, 9), min_size=4, max_size=4))
def test_a_mean_does_not_depend_on_the_order_of_ranks(order, values):
    ranks = [{"b": Entry(torch.tensor([value]), "mean", 1.0 + i)} for i, value in enumerate(values)]
    shuffled = [ranks[i] for i in order]
    assert torch.allclose(merge(ranks)["b"].value, merge(shuffled)["b"].value)
