"""A step over the flat buffers is the optimizer's own, whatever happens to the optimizer."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparkdml.training.flat import FlatParams
from sparkdml.training.flat_step import ELEMENTWISE, FlatStep, flat_step
from sparkdml.training.modules import Modules

SETTINGS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    kind.__name__: kind for kind in ELEMENTWISE
} | {
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": partial(torch.optim.SGD, momentum=0.9, dampening=0.5, maximize=True),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "tensor lr": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr)),
    "foreach": partial(torch.optim.Adam, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "centered": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.2),
}


class Odd(nn.Module):
    """With a parameter of no dimension, one of one number, and some of odd lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))


class Twins:
    """The same model twice: one steps through `flat_step`, one through its optimizer."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.flat, self.plain = Odd(), Odd()
        self.plain.load_state_dict(self.flat.state_dict())
        self.params = FlatParams(self.flat, num_stats=1)
        self.optimizer = make(self.flat.parameters(), lr=0.05)
        self.reference = make(self.plain.parameters(), lr=0.05)
        self.step = flat_step(self.optimizer, self.params, list(self.flat.parameters()))

    def __iter__(self) -> Any:
        return iter((self.optimizer, self.reference))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for ours, theirs in zip(self.flat.parameters(), self.plain.parameters(), strict=True):
                assert ours.grad is not None
                theirs.grad = torch.randn_like(theirs)
                ours.grad.copy_(theirs.grad)
            self.step()
            self.reference.step()
            self.check()

    def check(self) -> None:
        for ours, theirs in zip(self.flat.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        ours, theirs = self.optimizer.state_dict(), self.reference.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for index, state in theirs["state"].items():
            assert ours["state"][index].keys() == state.keys()
            for name, value in state.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(
                        ours["state"][index][name], value, rtol=1e-6, atol=1e-7
                    )
                else:
                    assert ours["state"][index][name] == value


@pytest.fixture(params=SETTINGS)
def twins(request: pytest.FixtureRequest) -> Twins:
    twins = Twins(SETTINGS[request.param])
    assert isinstance(twins.step, FlatStep)
    return twins


def test_it_is_the_optimizers_own_step(twins: Twins) -> None:
    twins.train(7)


def test_it_is_one_update_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(torch.optim.Adam)
    seen: list[list[torch.Size]] = []
    module = importlib.import_module("torch.optim.adam")
    inner = module.adam

    def adam(params: list[Tensor], *others: Any, **settings: Any) -> None:
        seen.append([p.shape for p in params])
        inner(params, *others, **settings)

    monkeypatch.setattr(module, "adam", adam)
    twins.step()
    assert seen == [[twins.params.values.shape]]


def test_settings_may_change_between_steps(twins: Twins) -> None:
    twins.train(2)
    for optimizer in twins:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] / 4
    twins.train(2)


def test_hooks_are_called_and_may_come_and_go(twins: Twins) -> None:
    twins.train(2)
    seen: list[Any] = []
    hook = twins.optimizer.register_step_post_hook(lambda who, *_: seen.append(who))
    twins.train(2)
    assert seen == [twins.optimizer] * 2
    hook.remove()
    twins.train(2)
    assert len(seen) == 2


def test_a_hook_on_every_optimizer() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    twins, seen = Twins(torch.optim.Adam), []
    hook = register_optimizer_step_pre_hook(lambda who, *_: seen.append(who))
    try:
        twins.train(1)
    finally:
        hook.remove()
    assert twins.optimizer in seen


def test_a_step_that_someone_replaced_is_called() -> None:
    twins, seen = Twins(torch.optim.SGD), []
    own = twins.optimizer.step
    twins.optimizer.step = lambda *_: seen.append(own())  # type: ignore[method-assign,assignment]
    twins.train(3)
    assert len(seen) == 3


def test_schedulers_know_that_there_was_a_step(twins: Twins) -> None:
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in twins]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            twins.train(1)
            for scheduler in schedulers:
                scheduler.step()


def test_a_state_that_was_loaded_is_used(twins: Twins) -> None:
    twins.train(3)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins]
    twins.train(2)
    for optimizer, state in zip(twins, saved, strict=True):
        optimizer.load_state_dict(state)
    twins.train(2)


@pytest.mark.parametrize("name", [n for n in SETTINGS if n not in ("Adagrad", "adagrad")])
def test_a_state_that_was_cleared_starts_over(name: str) -> None:
    twins = Twins(SETTINGS[name])
    twins.train(3)
    for optimizer in twins:
        optimizer.state.clear()
    twins.train(2)


def test_a_state_that_was_cleared_after_a_hooks_step_starts_over() -> None:
    twins = Twins(torch.optim.Adam)
    twins.train(2)
    hook = twins.optimizer.register_step_post_hook(lambda *_: None)
    twins.train(1)
    hook.remove()
    for optimizer in twins:
        optimizer.state.clear()
    twins.train(2)


def test_parameters_that_counted_differently_stay_apart() -> None:
    twins = Twins(torch.optim.Adam)
    twins.train(2)
    for optimizer, module in zip(twins, (twins.flat, twins.plain), strict=True):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        optimizer.state[module.scale]["step"] += 5
    twins.train(3)


def test_a_parameter_that_has_not_begun_stays_apart() -> None:
    twins = Twins(SETTINGS["momentum"])
    twins.train(2)
    for optimizer, module in zip(twins, (twins.flat, twins.plain), strict=True):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.state[module.scale]["momentum_buffer"] = None
    twins.train(3)


def test_it_follows_parameters_to_another_buffer(twins: Twins) -> None:
    twins.train(2)
    twins.params.rebind(twins.params.values.clone())
    twins.train(2)


def test_states_share_one_buffer_but_count_each_for_themselves() -> None:
    twins = Twins(torch.optim.Adam)
    twins.train(1)
    steps = [twins.optimizer.state[p]["step"] for p in twins.flat.parameters()]
    assert len({step.data_ptr() for step in steps}) == len(steps)
    averages = [twins.optimizer.state[p]["exp_avg"] for p in twins.flat.parameters()]
    assert len({average.untyped_storage().data_ptr() for average in averages}) == 1


def test_an_optimizer_for_each_module() -> None:
    modules = Modules({"a": nn.Linear(3, 2), "b": nn.Linear(4, 3)})
    params = FlatParams(modules, num_stats=1)
    before = {name: [p.clone() for p in part.parameters()] for name, part in modules.items()}
    parameters = list(modules["a"].parameters())
    params.grads.fill_(1.0)
    flat_step(torch.optim.SGD(parameters, lr=0.5), params, parameters)()
    for ours, old in zip(modules["a"].parameters(), before["a"], strict=True):
        assert torch.equal(ours, old - 0.5)
    for ours, old in zip(modules["b"].parameters(), before["b"], strict=True):
        assert torch.equal(ours, old)


def test_what_is_not_alike_for_every_number_is_left_to_the_optimizer() -> None:
    class Own(torch.optim.SGD):
        pass

    module = Odd()
    params, parameters = FlatParams(module, num_stats=1), list(module.parameters())
    groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]
    for optimizer in (
        Own(parameters),
        torch.optim.Adafactor(parameters),
        torch.optim.SGD(groups, lr=0.2),
        torch.optim.SGD(parameters[:2]),
    ):
        assert flat_step(optimizer, params, parameters) == optimizer.step


def test_a_group_that_is_added_later() -> None:
    twins = Twins(torch.optim.SGD)
    twins.train(1)
    for optimizer in twins:
        extra = nn.Parameter(torch.zeros(2))
        extra.grad = torch.ones(2)
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
    twins.train(1)
    assert torch.equal(extra, torch.full((2,), -0.5))
