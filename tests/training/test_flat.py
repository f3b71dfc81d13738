"""Flat parameters: the module trains in the buffer, and the buckets cover every gradient once."""

import pytest
import torch
from torch import nn

from sparkdml.errors import ParameterError
from sparkdml.training.flat import FlatParams
from sparkdml.training.modules import build_module


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_parameters_and_gradients_are_views():
    module, reference = make(), make()
    flat = FlatParams(module, num_stats=2)
    inputs = torch.randn(5, 4)
    module(inputs).sum().backward()
    reference(inputs).sum().backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)
    flat.values.zero_()
    assert not any(p.any() for p in module.parameters())
    flat.zero()
    assert not any(p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("max_bytes", [1, 40, 100, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_buckets_cover_gradients_and_stats_once(max_bytes, dtype):
    flat = FlatParams(make().to(dtype), num_stats=3)
    buckets = flat.buckets(max_bytes)
    for bucket in buckets:
        bucket.tensor.add_(1)
    assert (flat.grads == 1).all()
    assert (flat.stats == 1).all()
    assert sum(bucket.num_parameters for bucket in buckets) == len(flat.parameters)
    assert flat.stats.dtype.itemsize >= 4, "a half can't count rows"


def test_hooks_tell_when_a_gradient_is_complete():
    module = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))
    flat = FlatParams(module, num_stats=1)
    ready = []
    flat.on_gradient(ready.append)
    module(torch.randn(2, 4)).sum().backward()
    assert sorted(ready) == [0, 1, 2, 3]
    assert set(ready[:2]) == {0, 1}, "the last layer's come first"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_are_aligned_but_for_those_behind_odd_ones(dtype):
    module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 3), nn.Linear(3, 32)).to(dtype)
    FlatParams(module, num_stats=3)
    begin = {name: parameter.data_ptr() % 64 for name, parameter in module.named_parameters()}
    multiples = [n for n, p in module.named_parameters() if not p.nbytes % 64]
    assert not any(begin[name] for name in multiples)
    assert {"0.weight", "0.bias"} <= set(multiples)


def test_several_modules_lie_apart():
    module = build_module({"one": nn.Linear(3, 5), "other": nn.Linear(16, 16)})
    flat = FlatParams(module, num_stats=3)
    for part in module.values():
        own = flat.grads[flat.span_of(list(part.parameters()))]
        assert own.numel() == sum(p.numel() for p in part.parameters())


def test_tied_parameters_are_one():
    module = make()
    module[2].weight = nn.Parameter(torch.zeros(3, 8))
    module.tied = module[2]
    assert FlatParams(module, 0).values.numel() == 4 * 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.LazyLinear(3), "weight has none yet"),
        (nn.ReLU(), "at least one trainable parameter"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "one floating-point type"),
    ],
)
def test_modules_that_cannot_be_trained(module, words):
    with pytest.raises(ParameterError, match=words):
        FlatParams(module, 0)


class WithNothing(nn.Module):
    """Has a parameter without elements, as a layer of no units has."""

    def __init__(self):
        super().__init__()
        self.first, self.nothing = nn.Linear(4, 3), nn.Linear(4, 0, bias=False)

    def forward(self, inputs):
        return torch.cat([self.first(inputs), self.nothing(inputs)], dim=1)


def test_a_parameter_may_have_no_elements():
    module = WithNothing()
    flat = FlatParams(module, num_stats=2)
    module(torch.randn(5, 4)).sum().backward()
    flat.check_views()
    assert flat.grads.any()
